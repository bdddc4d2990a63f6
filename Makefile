# make test: what CI runs. make check: the fast part. make test-all: builds, studies, sanitizers as well.
# make reproduce: the results. Each creates .venv if needed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Python compiles a module when it is first imported; to compile all of torch's here takes longer than to install it.
PIP := $(BIN)/pip install --quiet --no-compile
# Two workers on two cores, one thread each: more torch threads would only compete. Tests that share something slow
# (`xdist_group`) run in the same worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

.PHONY: setup test test-all check lint wheel sanitize avx512 reproduce docs site clean

setup: $(READY)

$(READY): pyproject.toml setup.py constraints.txt $(wildcard src/blockmean/optim/kernels/*.[ch]pp)
	@echo "Setting up .venv, once: a minute or two of work, and the time to download torch."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) --upgrade pip
	@echo "Installing torch and the tools, compiling the kernels ..."
	@$(PIP) --constraint constraints.txt --editable '.[dev]'
	@$(PIP) --constraint constraints.txt --no-deps curvlinops-for-pytorch
	@touch $@
	@echo "Done: $(BIN)/python, $(BIN)/blockmean."

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m ''
	$(MAKE) sanitize avx512

check: lint
	$(PYTEST) -m 'not slow and not packaging and not study'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

# One wheel per platform: its kernels fit every Python from 3.11 on and every torch.
wheel: $(READY)
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

# The kernels with AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the package; leaks are Python's own.
sanitize: $(READY)
	rm -rf build/sanitize && mkdir -p build/sanitize
	cp -r src setup.py pyproject.toml README.md LICENSE build/sanitize
	cd build/sanitize && rm -f src/blockmean/optim/kernels/*.so && BLOCKMEAN_SANITIZE=1 $(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=build/sanitize/src OMP_NUM_THREADS=1 $(BIN)/pytest -p no:cacheprovider -x tests/optim/test_native.py \
		tests/optim/test_anova_native.py \
		-k 'not fork'

# The AVX-512 kernels on a processor without it, their instructions lane by lane, in a copy of the package.
avx512: $(READY)
	rm -rf build/avx512 && mkdir -p build/avx512
	cp -r src setup.py pyproject.toml README.md LICENSE build/avx512
	cd build/avx512 && rm -f src/blockmean/optim/kernels/*.so && BLOCKMEAN_STAND_IN=$(CURDIR)/tests/support/avx512.h $(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace
	PYTHONPATH=build/avx512/src BLOCKMEAN_INSTRUCTIONS=avx512 OMP_NUM_THREADS=1 $(BIN)/pytest -p no:cacheprovider -x tests/optim/test_native.py \
		tests/optim/test_passes.py tests/optim/test_adam.py tests/optim/test_adagrad.py

reproduce: $(READY)
	$(BIN)/blockmean reproduce

docs: $(READY)
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/figures_curvature.py
	$(BIN)/python docs/results.py

# The documentation as pages in out/site. Ends at a snippet that fails, a dead link, or a public name without a place.
site: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/test_docs.py -k python_blocks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist out src/*.egg-info
