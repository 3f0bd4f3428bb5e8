# Every target sets up what it needs. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete

.DEFAULT_GOAL := help
.PHONY: help setup demo run check test bench lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## the virtual environment .venv alone

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("tidewheel needs Python 3.11 or later, this is " + sys.version) if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)  ## a durable scheduler with real work going through it; ends by itself within a minute
	@$(BIN)/python -m examples.demo

run: $(STAMP)  ## the same scheduler and sample app; stays up and prints the address of its API
	@$(BIN)/tidewheel dev examples.sample_app:app --data .data

check: $(STAMP)  ## lint, types and import rules, without the tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

test: check  ## check, and all tests that this machine can run; what was skipped is said at the end
	@$(BIN)/python -m tests.services fetch
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

bench: $(STAMP)  ## a short form of all benchmarks; writes benchmarks/RESULTS.md
	@$(BIN)/python -m benchmarks all --short

lock: $(STAMP)  ## resolve requirements/dev.txt anew from pyproject.toml
	@$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links \
	  --no-header --extra dev --upgrade --output-file requirements/dev.txt pyproject.toml

clean:  ## remove the environment, caches and the data of `make run`
	@rm -rf $(VENV) .data .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
