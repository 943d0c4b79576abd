# Every target sets up .venv by itself; all it needs is Python 3.11 or newer.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := .ci/constraints.txt
# The stamp is named after what the environment is made from: a changed pin makes a new one.
READY := $(VENV)/.ready-$(shell cat pyproject.toml $(PINS) 2>/dev/null | sha256sum | cut -c1-16)
PIP_FLAGS := -qq --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
NEVER := not full and not lower and not gpu

.PHONY: help venv demo test test-full check unit e2e bench lower fmt pins clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(READY)  ## make .venv with the pinned versions

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, %s is %s; set PYTHON=python3.11" % (sys.executable, sys.version.split()[0]))'
	@if [ "$$(cat $(VENV)/.home 2>/dev/null)" != "$(CURDIR)" ]; then $(PYTHON) -m venv --clear $(VENV); fi
	@rm -f $(VENV)/.ready-*
	@echo "setting up $(VENV) (once; torch is large)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c $(PINS) pip hatchling editables
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c $(PINS) --no-build-isolation -e '.[all]' --group dev
	@echo "$(CURDIR)" > $(VENV)/.home
	@touch $@

demo: $(READY)  ## train a small GPT, break it, watch it being saved
	@$(BIN)/sentinel demo

test: check unit e2e  ## everything that CI runs

test-full: check unit e2e $(READY)  ## the same, and the tests that take minutes
	@$(PYTEST) -m "full and not lower and not gpu"

check: $(READY)  ## lint, format, types, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# Tests that start processes have deadlines: they run alone, the others on two workers.
unit: $(READY)  ## tests that start no processes, on two workers
	@$(PYTEST) -q -n 2 -m "not e2e and $(NEVER)"

e2e: $(READY)  ## tests that start processes, one at a time
	@$(PYTEST) -q -m "e2e and $(NEVER)"

bench: $(READY)  ## print the cost tables; a person reads them
	@$(BIN)/python -m tests.bench

lower: $(READY)  ## the fast tests with the lowest versions that pyproject.toml declares
	@$(BIN)/python .ci/lower.py

fmt: $(READY)  ## fix what can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

pins: $(READY)  ## write the versions now installed into .ci/constraints.txt
	@$(BIN)/python .ci/pins.py > $(PINS).new && mv $(PINS).new $(PINS)

clean:  ## remove .venv and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
