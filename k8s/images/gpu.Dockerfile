# Serves every profile with the tritonserver and the C++ backends of NVIDIA's container, and builds plans for it.
#   docker build -f k8s/images/gpu.Dockerfile --build-arg TRITON_VERSION=26.10 -t cosytriton:0.1.0 .
# TensorRT's Python bindings come in the version of the base's library. The build ends with an error where the
# base's TensorRT, ONNX Runtime, CUDA or Python does not fit (see check.py).
ARG TRITON_VERSION=26.10
ARG BASE=nvcr.io/nvidia/tritonserver:${TRITON_VERSION}-py3

FROM ${BASE} AS build
COPY . /src
# The system's Python is the one in which Triton runs Python models. Without pip: what is copied below can run,
# and install nothing.
RUN python3 -m venv --without-pip /opt/cosytriton \
    && python3 -m pip --python /opt/cosytriton/bin/python install --no-cache-dir --only-binary=:all: "/src[container]"
RUN bindings="$(/opt/cosytriton/bin/python /src/k8s/images/check.py --bindings)" \
    && python3 -m pip --python /opt/cosytriton/bin/python install --no-cache-dir --only-binary=:all: "${bindings}" \
    && /opt/cosytriton/bin/python /src/k8s/images/check.py --gpu

FROM ${BASE}
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="cosytriton" \
      org.opencontainers.image.description="CosyVoice text-to-speech on NVIDIA Triton, GPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"
COPY --from=build /opt/cosytriton /opt/cosytriton
# The root file system may be read-only: only /tmp and /dev/shm are written. Nothing is downloaded.
ENV PATH=/opt/cosytriton/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1
USER 1000:1000
EXPOSE 8001 8002
ENTRYPOINT ["cosytriton"]
CMD ["serve", "--repository=/models", "--host=0.0.0.0", "--profile=gpu"]
