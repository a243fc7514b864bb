# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=
WORKERS ?= 3

BIN := $(VENV)/bin
# A file's tests share servers, so a worker runs whole files, the long ones of tests/e2e first.
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: serve test test-all pull lint format clean

serve: $(VENV)/.serve-installed
	@$(BIN)/ringserve serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

# Where a machine sets this, each of the hundred servers that tests start would compile its modules anew.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: pull
	$(BIN)/python -m pytest $(PARALLEL)

test-all: pull
	$(BIN)/python -m pytest -m ""

pull: $(VENV)/.dev-installed
	@$(BIN)/ringserve pull

lint: $(VENV)/.dev-installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/.dev-installed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ringserve needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing ringserve and its dependencies into $(VENV) ..."
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing ringserve and its test tools into $(VENV) ..."
	@$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.serve-installed
