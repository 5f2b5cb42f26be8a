# Serves the profiles cpu and cpu_int8 with the tritonserver of the wheel. From the repository's root:
#   docker build -f k8s/images/cpu.Dockerfile -t cosytriton:0.1.0-cpu .
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
COPY . /src
# Without pip: what is copied below can run, and install nothing.
RUN python -m venv --without-pip /opt/cosytriton \
    && python -m pip --python /opt/cosytriton/bin/python install --no-cache-dir --only-binary=:all: "/src[serve]" \
    && /opt/cosytriton/bin/python /src/k8s/images/check.py

FROM ${BASE}
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="cosytriton" \
      org.opencontainers.image.description="CosyVoice text-to-speech on NVIDIA Triton, CPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"
RUN python -m pip uninstall --yes pip setuptools wheel
COPY --from=build /opt/cosytriton /opt/cosytriton
# The root file system may be read-only: only /tmp and /dev/shm are written. Nothing is downloaded.
ENV PATH=/opt/cosytriton/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1
USER 1000:1000
EXPOSE 8001 8002
ENTRYPOINT ["cosytriton"]
CMD ["serve", "--repository=/models", "--host=0.0.0.0"]
