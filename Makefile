# make demo   see a prompt pass from prefill to decode, on this machine's CPU
# make test   the CPU tests
# make bench  what this CPU gives: printed, and written to bench/results/cpu.json
# make test-optimized  the CPU tests under `python -O`: the product without its asserts
# make docs            the pages and tables that are made from code and bench/results/
# make wheel           the package, in dist/, with its list of files checked
# make wheel-demo      that wheel in a virtual environment of its own, and its demo from an empty folder
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
WORKERS ?= 3
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST := $(RUN) -m pytest $(SPREAD) --durations=10

.PHONY: demo test test-all test-optimized fault-sweep check format proto bench docs wheel wheel-demo clean

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
	$(RUN) -m baton.bench.pages.reference docs
	$(RUN) -m baton.bench.report

# setuptools copies to build/ what it packs, and would pack what an earlier run left there.
wheel: $(READY)
	rm -rf build/lib build/bdist.* *.egg-info dist
	$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(RUN) .ci/check_wheel.py dist/*.whl

# The packages that the wheel depends on are those of .venv, by a path; nothing is downloaded.
wheel-demo: wheel
	rm -rf build/wheel-demo && mkdir -p build/wheel-demo/empty
	$(BIN)/python -m venv build/wheel-demo/venv
	build/wheel-demo/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	$(RUN) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$(build/wheel-demo/venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/of_venv.pth
	cd build/wheel-demo/empty && ../venv/bin/python -c \
	  "import baton, sys; print(baton.__file__); assert baton.__file__.startswith(sys.prefix)"
	cd build/wheel-demo/empty && ../venv/bin/baton demo

clean:
	rm -rf .venv build dist *.egg-info

$(READY): pyproject.toml
	@echo "setting up .venv with $$($(PYTHON) --version)"
	$(if $(wildcard $(UNFINISHED)),rm -rf .venv)
	@test -e $@ || { mkdir -p .venv && touch $(UNFINISHED); }
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)" || { \
	  echo "pip found no '$(TORCH)': set TORCH_INDEX to PyTorch's index of CPU wheels"; exit 1; }
	$(PIP) -e ".[dev]"
	@rm -f $(UNFINISHED) && touch $@
