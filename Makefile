# Every target first makes sure that .venv exists and is up to date; nothing else has to be installed by hand.
# Needed: Python 3.11 or newer with pip and venv, make, a C compiler.

VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.torchglb-installed
INSTALLING := $(VENV)/.torchglb-installing
WARM := $(VENV)/.torchglb-warm

# The interpreter that creates .venv; override with `make PYTHON=python3.12 test`.
PYTHON ?= $(shell if python3.11 -c '' >/dev/null 2>&1; then echo python3.11; else echo python3; fi)

.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-browser test-lowest bench coverage docs docs-serve release format clean

help:
	@echo "make demo       the paper's Figure 1 in small, in about a minute; writes results/figure1-quick"
	@echo "make test       lint, format check, types, tests"
	@echo "make test-slow  the tests marked slow"
	@echo "make test-browser  the report in headless Chromium, which has to be installed"
	@echo "make test-lowest   the tests with the lowest versions that pyproject.toml allows"
	@echo "make bench      the benchmarks, quick mode"
	@echo "make coverage   lines and branches that the tests reach, room by room"
	@echo "make docs       the site, into site/; make docs-serve shows it"
	@echo "make release    checks, builds and tags the version of pyproject.toml"
	@echo "make format     format the code, fix what lint can fix"
	@echo "make clean      remove caches and build leftovers"

demo: $(STAMP)
	$(VENV)/bin/torchglb run figure1 --quick

# tests start many processes, which read what the first has translated: bytecode is written
export PYTHONDONTWRITEBYTECODE :=

# two processes, a file at a time, in the order of tests/conftest.py: the longest first
TWO := -n 2 --dist loadfile --no-loadscope-reorder

# says how long it took: it is to stay under ten minutes on two cores
test: $(WARM)
	@begin=$$(date +%s); $(MAKE) --no-print-directory checks; status=$$?; \
	  echo "make test took $$(( $$(date +%s) - begin )) s"; exit $$status

# types are checked beside the tests, some of which wait for other processes
.PHONY: checks
checks:
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	@$(RUN) -m mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
	  OMP_NUM_THREADS=1 $(RUN) -m pytest $(TWO); tests=$$?; \
	  wait $$types; types=$$?; cat $(VENV)/types.txt; exit $$(( tests || types ))

# All that the tests compile is compiled before them, by two processes that share the work (in the tests
# each would do all of it), once for each state of the compiled functions; it says its own seconds.
COMPILED := $(shell grep -rlE '^@(kernel|vectorised|allocating|inlined|entry)' torchglb --include='*.py')
$(WARM): $(STAMP) $(COMPILED)
	$(RUN) -m torchglb.warm --all
	@touch $@

test-slow: $(WARM)
	$(RUN) -m pytest -m slow

test-browser: $(STAMP)
	$(RUN) -m pytest -m browser

# An environment of its own, with a cache of its own: functions that another Numba has compiled are none
# of its business. It is filled before the tests, some of which wait for processes that would each compile
# for themselves. constraints-lowest.txt has the lowest versions, but for torch: wheels
# of its older versions are not everywhere; `make test-lowest LOWEST_TORCH=2.4.0` tries one.
LOWEST := .venv-lowest
LOWEST_RUN = NUMBA_CACHE_DIR=$(abspath $(LOWEST))/numba OMP_NUM_THREADS=1 $(LOWEST)/bin/python
LOWEST_TORCH ?=
test-lowest:
	$(PYTHON) -m venv --clear $(LOWEST)
	if [ -n "$(LOWEST_TORCH)" ]; then \
	  sed 's/^torch==.*/torch==$(LOWEST_TORCH)/' constraints-lowest.txt > $(LOWEST)/constraints.txt; \
	else cp constraints-lowest.txt $(LOWEST)/constraints.txt; fi
	$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check \
	  -c $(LOWEST)/constraints.txt -e ".[data,plot,solvers,table]" build mpmath polars pyarrow \
	  hypothesis pytest pytest-xdist
	$(LOWEST_RUN) -m torchglb.warm --all
	$(LOWEST_RUN) -m pytest $(TWO) -W default

bench: $(STAMP)
	@begin=$$(date +%s); $(RUN) experiments/bench.py all --quick; status=$$?; \
	  echo "make bench took $$(( $$(date +%s) - begin )) s"; exit $$status

# A subset that takes minutes; `make coverage COVERED=tests` measures all.
COVERED ?= tests/rows/test_history.py tests/test_domain.py tests/families/test_families.py tests/optim/test_optim.py tests/sets/test_sets.py \
  tests/test_theory.py tests/inference/test_tests.py tests/docs/test_docstrings.py
coverage: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(TWO) --cov=torchglb --cov-branch --cov-report= $(COVERED)
	$(RUN) -m coverage json -q -o .coverage.json
	$(RUN) experiments/coverage_by_room.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

release: $(STAMP)
	$(RUN) experiments/release.py

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf build dist site *.egg-info .coverage .coverage.json .mypy_cache .pytest_cache .ruff_cache
	find torchglb tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted installation is repeated. An environment without a working
# pip, with too old a Python, or whose installation was killed half-way (INSTALLING is still there: files of a
# package may be missing although pip believes it installed) is created anew.
$(STAMP): pyproject.toml constraints.txt
	@if [ -e $(INSTALLING) ] || ! $(RUN) -m pip --version >/dev/null 2>&1 \
	    || ! $(RUN) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "torchglb needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	  echo "Creating $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear $(VENV); \
	fi
	@echo "Installing torchglb and its development tools into $(VENV) (the first time takes some minutes)"
	@trap 'exit 130' INT TERM; touch $(INSTALLING); \
	  $(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"; \
	  status=$$?; rm -f $(INSTALLING); \
	  [ $$status -eq 0 ] || echo "For the details: $(RUN) -m pip install -c constraints.txt -e '.[dev]'" >&2; \
	  exit $$status
	$(RUN) -m torchglb.warm
	@touch $@
