# make demo   see a prompt pass from prefill to decode, on this machine's CPU
# make test   the CPU tests
# make bench  what this CPU gives: printed, and written to bench/results/cpu.json
# make test-optimized  the CPU tests under `python -O`: the product without its asserts
# make fault-sweep     STREAMS=10000 on a cluster that breaks all the time: bench/results/fault_sweep.json
# Each sets up .venv by itself. See README.md.

PYTHON ?= python3
# Without a GPU only the CPU build will do: the default one brings gigabytes of CUDA packages.
# Where pip cannot find it, set TORCH_INDEX to PyTorch's index of CPU wheels (see its install page).
TORCH ?= $(if $(shell command -v nvidia-smi),torch>=2.11,torch==2.13.0+cpu)
TORCH_INDEX ?=

BIN := .venv/bin
RUN := PYTHONSAFEPATH=1 $(BIN)/python
PIP := $(RUN) -m pip install --disable-pip-version-check --progress-bar on
READY := .venv/.ready
# There while .venv is set up for the first time. A pip that was interrupted leaves packages half
# there, and cannot always go on from them: then all begins anew.
UNFINISHED := .venv/.unfinished

# Tests run in several processes, each file's in one of them: tests/README.md has the rules. What
# starts clusters comes first in the order of the folders' names, small files last.
WORKERS ?= 2
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST := $(RUN) -m pytest $(SPREAD) --durations=10

.PHONY: demo test test-all test-optimized fault-sweep check format proto bench docs clean

demo: $(READY)
	@$(BIN)/baton demo

test: $(READY)
	$(PYTEST) -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: $(READY)
	$(PYTEST) -m "not gpu" --hypothesis-profile=thorough $(PYTEST_ARGS)

test-optimized: $(READY)
	PYTHONOPTIMIZE=1 $(PYTEST) -m "not slow and not gpu" $(PYTEST_ARGS)

fault-sweep: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -s -m slow tests/integration/faults/test_fault_sweep.py \
	  --fault-streams $(or $(STREAMS),10000) --fault-out bench/results/fault_sweep.json

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .venv/import-root && ln -sfn $(CURDIR) .venv/import-root/baton
	MYPYPATH=.venv/import-root $(BIN)/mypy -p baton

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(READY)
	$(RUN) proto/generate.py

bench: $(READY)
	@OMP_NUM_THREADS=1 $(RUN) -m baton.bench.cpu $(FAMILIES)

docs: $(READY)
	$(RUN) -m baton.cli.reference docs

clean:
	rm -rf .venv build *.egg-info

$(READY): pyproject.toml
	@echo "setting up .venv with $$($(PYTHON) --version)"
	$(if $(wildcard $(UNFINISHED)),rm -rf .venv)
	@test -e $@ || { mkdir -p .venv && touch $(UNFINISHED); }
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)" || { \
	  echo "pip found no '$(TORCH)': set TORCH_INDEX to PyTorch's index of CPU wheels"; exit 1; }
	$(PIP) -e ".[dev]"
	@rm -f $(UNFINISHED) && touch $@
