# `make demo` and `make test` set up .venv on their first run; a second run skips that.
PYTHON ?= python3
VENV ?= .venv
JAX ?= jax
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types pytest clean

demo: $(READY)
	$(BIN)/paged-kv generate --demo

test: lint types pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(READY)
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -m pytest

$(READY): pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' '$(JAX)'
	touch $@

clean:
	rm -rf $(VENV)
