# make demo    train elastically: three slices, one is killed and returns; is the result the same?
# make test    the tests, in under ten minutes on two cores
# Both make .venv first (make install). PYTHON chooses the interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
PY_TAG := $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])' 2>/dev/null)
PINS := requirements/py$(PY_TAG).txt
PACKAGES := $(VENV)/.packages-py$(PY_TAG)
INSTALLED := $(VENV)/.installed-py$(PY_TAG)
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps
# A process of tests for each core; those of a file stay together, for they share clusters.
BESIDE := -n auto --maxprocesses 4 --dist loadfile --max-worker-restart 0
SUPPORTED = $$(ls requirements | sed -n 's/^py\(.\)\(..\)\.txt$$/\1.\2/p' | xargs)
say = @echo "regrow: $(1)"
fail = { echo "regrow: $(1)" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-newest lint format docs-check bench pins clean

help:
	@sed -n '1,/^$$/s/^# //p' Makefile
	@echo "also: make install, test-all, test-newest, lint, format, docs-check, bench, pins, clean"

install: $(INSTALLED)

# A stamp is newer than what it was made from while .venv is up to date.
$(PACKAGES): $(wildcard $(PINS))
	@test -n "$(PY_TAG)" || $(call fail,there is no Python called '$(PYTHON)'; choose one with PYTHON=...)
	@test -f $(PINS) || $(call fail,$$($(PYTHON) --version) is none of $(SUPPORTED); choose one with PYTHON=...)
	$(call say,making $(VENV) with $$($(PYTHON) --version); this takes about a minute and is done once)
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || $(call fail,'$(PYTHON) -m venv' failed; Debian and Ubuntu have it in python3-venv)
	@$(PIP_INSTALL) --require-hashes --only-binary :all: -r $(PINS)
	@touch $@

$(INSTALLED): $(PACKAGES) pyproject.toml
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

demo: install
	$(call say,three slices of two devices train; slice 1 is killed at step 60 and returns 3 s later)
	@$(IN_VENV) regrow prove --slices 3 --devices-per-slice 2 --chaos kill:1@step=60 --restore-after 3 \
		examples/elastic_training.py --steps 160 --out 'training-output/{run}' $(DEMO_ARGS)

test: install
	$(call say,tests with jax $$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("jax"))'))
	@$(IN_VENV) python -m pytest -q $(BESIDE) -m "not slow" $(PYTEST_ARGS)

test-all: install
	$(call say,all tests)
	@$(IN_VENV) python -m pytest -q $(BESIDE) $(PYTEST_ARGS)

# The same tests on the newest jax, which wants Python 3.12 or later.
test-newest:
	@python=$$(.ci/newest-python) || $(call fail,no Python 3.12 or later that can make a venv is at hand); \
	$(MAKE) --no-print-directory test VENV=.venv-newest PYTHON="$$python"

lint: install
	$(call say,ruff)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || $(call fail,'make format' mends this)
	$(call say,mypy --strict)
	@$(BIN)/mypy --no-error-summary
	$(call say,import contracts)
	@$(IN_VENV) lint-imports --no-logo --cache-dir .cache/import-linter >.cache/contracts.txt 2>&1 || \
		{ cat .cache/contracts.txt; exit 1; }

format: install
	@$(BIN)/ruff check --fix-only --quiet
	@$(BIN)/ruff format --quiet

# Pages whose commands and outputs have to be true: each is walked from its top to its end.
docs-check: install
	@$(IN_VENV) python -m pytest -q -m slow tests/test_docs.py $(PYTEST_ARGS)

bench: install
	$(call say,benchmarks)
	@$(IN_VENV) python benchmarks/run.py $(BENCH_ARGS)

pins:
	@requirements/update $(PINS_ARGS)

clean:
	rm -rf .venv .venv-newest .cache build dist
