# make test: everything CI runs. make check: the fast part. make reproduce: see the results. Each sets up .venv itself.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two workers on two cores, one thread each: torch's threads would only fight.
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
