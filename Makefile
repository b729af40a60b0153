# make demo | test | lint | gpu | wheel. On a fresh machine the first call builds .venv; later calls start at once.

PYTHON ?= python3
# A local wheel of this exact version is taken where there is one; a bare "torch" would fetch the newest CUDA build.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests start processes that import torch: compiling its sources in each would take longer than what they test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint gpu wheel clean

demo: $(READY)
	$(BIN)/samebits demo

# One thread in each of the two processes, because four would wait for each other on two cores; work is stolen, because a test
# of a minute may come last.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --no-skips

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy

# A GPU machine brings its own torch, and its driver decides which; a second torch beside it would be the wrong one.
gpu:
	@if $(PYTHON) -c "import torch" 2>/dev/null; then \
		PYTHONPATH=src $(PYTHON) -m samebits.gpu; \
	else \
		$(MAKE) $(READY) && $(BIN)/python -m samebits.gpu; \
	fi

wheel: $(READY)
	$(BIN)/python -m build --wheel --no-isolation

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --no-compile "$(TORCH)"
	$(BIN)/python -m pip install -qq --no-compile --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist report src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
