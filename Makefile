# `make demo` and `make test` set up what they need; Python 3.11 is all that must be there.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test check format gate gate-full gpu int8 listen soak full loadtest loadtest-full chart rollout bench clean

demo: $(READY) ## export the demo voice, serve it, speak demo.wav and demo_stream.wav
	$(BIN)/cosytriton demo

test: $(READY)
	$(BIN)/pytest

check: $(READY) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gate: $(READY) ## every graph is parsed and built by TensorRT-RTX, without a GPU
	$(PIP) -e '.[gate]'
	$(BIN)/pytest -m gate

gate-full: $(READY) ## the same for the official sizes: an hour, 25 GB of disk
	$(PIP) -e '.[gate]'
	for family in cosyvoice1 cosyvoice2 cosyvoice3; do \
		$(BIN)/cosytriton checkpoint build/full/$$family --size full --family $$family && \
		$(BIN)/cosytriton export build/full/$$family --repository build/full/$$family.repository && \
		$(BIN)/cosytriton build --graphs --profile gpu_fp16 gpu_int8 --repository build/full/$$family.repository && \
		$(BIN)/cosytriton gate --repository build/full/$$family.repository || exit 1; \
		rm -rf build/full; \
	done

gpu: $(READY) ## a plan is built and run on this machine's GPU
	$(BIN)/pytest -m gpu

int8: $(READY) ## the tests of the served pipeline again, in the profile cpu_int8
	$(BIN)/pytest --profile=cpu_int8 tests/serving --ignore=tests/serving/test_profiles.py

listen: $(READY) ## a speech recogniser writes down what the demo voice says
	$(PIP) -e '.[listen]'
	$(BIN)/pytest -m listen -s

soak: $(READY) ## 20 minutes at 70 % of capacity, some listeners leave, some requests are wrong: memory stays flat
	$(BIN)/pytest -m soak -s

full: $(READY) ## checkpoints of the official sizes: written, exported, served; 30 minutes, 16 GB, 20 GB of disk
	$(BIN)/pytest -m full -s

loadtest: $(READY) ## all scenarios under load keep the limits, and planted faults are named: 3 minutes
	$(BIN)/pytest -m loadtest -s tests/loadtests/test_loadtest.py

# The report is opened in a real browser.
loadtest-full: $(READY) ## percentiles, workers, planner, shadow evaluation and the report's page: 10 minutes
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install --yes --quiet --no-install-recommends chromium)
	$(BIN)/pytest -m loadtest tests/loadtests

chart: $(READY) ## the chart and its alerts, without a cluster; COSYTRITON_CRD_SCHEMAS=DIR adds strict schemas
	command -v promtool >/dev/null || (apt-get update -qq && apt-get install --yes --quiet --no-install-recommends prometheus)
	$(BIN)/pytest tests/k8s -m 'chart or not (rollout or loadtest)'

rollout: $(READY) ## upgrades and a kill behind a real proxy: no request fails; 10 minutes
	command -v haproxy >/dev/null || (apt-get update -qq && apt-get install --yes --quiet --no-install-recommends haproxy)
	$(BIN)/pytest -m rollout -s tests/k8s

# The official code pins a transformers that asks for older libraries than the server has, so they lie apart.
BENCH := build/bench
OFFICIAL := transformers==4.51.3 tokenizers==0.21.4 huggingface_hub==0.36.2

bench: $(READY) $(BENCH)/official $(BENCH)/repository ## beside PyTorch: 20 minutes, the first time an hour; AGAINST=earlier/results.json compares
	OMP_WAIT_POLICY=PASSIVE $(BIN)/cosytriton bench $(BENCH)/checkpoint --repository $(BENCH)/repository \
		--official $(BENCH)/official --output $(BENCH) $(if $(AGAINST),--against $(AGAINST))

$(BENCH)/official:
	$(PIP) --no-deps --target $@.part $(OFFICIAL)
	mv $@.part $@

# Untrained, of the official size, in both profiles; removed by `make clean` alone.
$(BENCH)/repository: | $(READY)
	rm -rf $(BENCH)/checkpoint $@.part
	$(BIN)/cosytriton checkpoint $(BENCH)/checkpoint --size full
	$(BIN)/cosytriton export $(BENCH)/checkpoint --repository $@.part
	$(BIN)/cosytriton build --repository $@.part --profile cpu_int8
	mv $@.part $@

# Triton's Python stub needs the shared libpython, which some distributions split off.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev]'
	$(PYTHON) -c "import ctypes.util as u, sys; sys.exit(not u.find_library('python3.11'))" \
		|| (apt-get update -qq && apt-get install --yes --quiet libpython3.11)
	touch $@

clean:
	rm -rf build $(VENV)
