# `make demo` and `make test` set up .venv on their first run; a second run skips that.
PYTHON ?= python3
VENV ?= .venv
JAX ?= jax
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types pytest soak docs clean

demo: $(READY)
	@JAX_PLATFORMS=cpu $(BIN)/paged-kv generate --max-new-tokens 96 \
	  "Name three primes." \
	  "Why is the sky blue?" \
	  "Write a short poem about a lighthouse keeper who counts the waves." \
	  "A train leaves at nine in the morning and travels at eighty kilometres an hour; another leaves \
	an hour later from the same station, on the same line, at one hundred and twenty kilometres an \
	hour. Explain step by step when the second train catches up with the first, and how far from the \
	station they are when it does."

test: lint types pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(READY)
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -m pytest

# Every operation at random against a plain-Python model, 200,000 steps; 20,000 requests served.
soak: $(READY)
	JAX_PLATFORMS=cpu SOAK_STEPS=$${SOAK_STEPS:-200000} $(BIN)/python -m pytest tests/test_state_machine.py
	JAX_PLATFORMS=cpu SOAK_REQUESTS=$${SOAK_REQUESTS:-20000} $(BIN)/python -m pytest tests/test_serving_soak.py

# The site, in build/docs; anything that is not right with a page or a docstring's link fails it.
docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs-ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]' '$(JAX)'
	touch $@

$(READY): pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' '$(JAX)'
	touch $@

clean:
	rm -rf $(VENV)
