# Two commands matter: `make quickstart` and `make test`. Each sets itself up in .venv.
PYTHON ?= python3
SEED ?= 0
KILLS ?= 30
ARGS ?=
BIN := .venv/bin

.PHONY: quickstart test test-slow test-faults lint clean

# torch first and pinned: whatever depends on it would pull a build with several GB of CUDA packages.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "areal needs Python 3.11 or newer; say which one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: .venv/.installed
	@$(BIN)/python examples/quickstart/quickstart.py --seed $(SEED) $(ARGS)

# Without debug ranges a traceback parses no source. Where one is logged by the garbage collector while pytest parses,
# CPython 3.11 ends in "AST constructor recursion depth mismatch" (python/cpython issue 106905).
PYTEST := $(BIN)/python -X no_debug_ranges -m pytest

test: lint
	$(PYTEST) -m 'not slow and not gpu'

test-slow: .venv/.installed
	$(PYTEST) -m 'slow and not gpu'

# Kills the quickstart's processes again and again, then proves that nothing was lost: tests/faults/soak.py --help
test-faults: .venv/.installed
	$(BIN)/python tests/faults/soak.py --seed $(SEED) --kills $(KILLS) $(ARGS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
