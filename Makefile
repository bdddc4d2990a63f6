# make test: everything that CI runs. make check: the fast part. make reproduce: the results. Each creates .venv if needed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two workers on two cores, one thread each: more torch threads would only compete.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

.PHONY: setup test check lint reproduce docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

test: lint
	$(PYTEST)

check: lint
	$(PYTEST) -m 'not slow'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

reproduce: $(READY)
	$(BIN)/blockmean reproduce

docs: $(READY)
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/figures_curvature.py
	$(BIN)/python docs/results.py

clean:
	rm -rf .venv build dist out src/*.egg-info
