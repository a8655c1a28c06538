# Two commands set Blink up from a clean clone, and both may be repeated at will:
#   make certify   install, fetch the model, run the smoke profile on the local rig, write the report
#   make test      install, lint, run the tests
# Variables:
#   PYTHON=python3.12       the Python that makes the environment (3.11 or newer)
#   VENV=.venv              the environment; made if it is not there
#   MODEL=path              a model on this disk instead of the fetched one (works without a network once installed)
#   OUT=out/certify         where the report goes
#   RIG=local PROFILE=smoke SEED=   passed to `blink certify`
#   TORCH_INDEX_URL=url     package index to take torch from (README: choosing a build of torch)
#   JOBS=2                  processes that run the tests; 0: in one, as when debugging
#   PYTEST_ARGS=            more arguments for pytest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help doctor certify test lint check bench flakes clean distclean install-verify install-dev model

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
OUT ?= out/certify
RIG ?= local
PROFILE ?= smoke
SEED ?=
TORCH_INDEX_URL ?=
JOBS ?= 2
PYTEST_ARGS ?=

DEFAULT_MODEL := SmolLM2-135M-Instruct
PY := $(VENV)/bin/python
BLINK := $(VENV)/bin/blink
STAMPS := $(VENV)/.blink
GOAL ?= certify

# What the native module is made from: the build description, the C++, and the Python definition of its header.
NATIVE_SOURCES := pyproject.toml constraints.txt $(wildcard CMakeLists.txt) \
	$(shell find blink_core/abi blink_core/device blink_core/runtime/native -type f \
		\( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu*' -o -name '*.py' \) 2>/dev/null)

# pip with its whole output in a log and only the lines that show progress on screen; on failure, the log's end.
define pip_install
	@mkdir -p $(STAMPS)
	@echo "== pip install $(1)"
	@$(PY) -m pip install --no-input --disable-pip-version-check $(1) 2>&1 | tee $(STAMPS)/pip.log \
		| { grep --line-buffered -E '^ *(Downloading .*\([0-9.]+ [MG]B\)|Building (wheel|editable) for|Installing|ERROR)' \
			| cut -c-160 || true; } \
		|| { echo "pip failed; the end of $(STAMPS)/pip.log:"; tail -n 40 $(STAMPS)/pip.log; exit 1; }
endef

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,12p'

doctor:
	@$(PYTHON) -c 'import json, venv' 2>/dev/null || { echo "$(PYTHON) is not there, or lacks its standard library. \
	To mend: apt-get update && apt-get install -y python3 python3-venv python3-dev g++ make"; exit 1; }
	@$(PYTHON) -m hil_rigs.doctor --goal $(GOAL) --venv $(VENV) --installed $(STAMPS)/$(GOAL) $(if $(MODEL),--model "$(MODEL)")

$(PY):
	@echo "== environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMPS)/torch: pyproject.toml constraints.txt | $(PY)
	@mkdir -p $(STAMPS)
	$(if $(TORCH_INDEX_URL),$(call pip_install,--no-deps --index-url $(TORCH_INDEX_URL) $(shell grep '^torch==' constraints.txt)))
	@touch $@

# Editable, so that the tests and the suite run the files of this clone; the native module is compiled here.
$(STAMPS)/native: $(NATIVE_SOURCES) | $(PY)
	$(call pip_install,-c constraints.txt --editable .)
	@touch $@

$(STAMPS)/certify: pyproject.toml constraints.txt $(STAMPS)/torch | $(STAMPS)/native
	$(call pip_install,-c constraints.txt 'blink-hil[verify]')
	@touch $@

$(STAMPS)/test: pyproject.toml constraints.txt $(STAMPS)/torch | $(STAMPS)/native
	$(call pip_install,-c constraints.txt 'blink-hil[verify$(,)dev]')
	@touch $(STAMPS)/certify $@

, := ,
install-verify: $(STAMPS)/native $(STAMPS)/certify
install-dev: $(STAMPS)/native $(STAMPS)/test

model: $(STAMPS)/native
	@$(if $(MODEL),test -e "$(MODEL)" || { echo "MODEL=$(MODEL) is not there"; exit 1; },$(BLINK) model fetch $(DEFAULT_MODEL) >/dev/null)

certify: GOAL := certify
certify: doctor install-verify model
	@$(BLINK) certify --rig $(RIG) --profile $(PROFILE) --model "$(or $(MODEL),$(DEFAULT_MODEL))" --out $(OUT) $(if $(SEED),--seed $(SEED))

test: GOAL := test
test: doctor install-dev model lint check

lint: install-dev
	@echo "== ruff check";     $(VENV)/bin/ruff check .
	@echo "== ruff format";    $(VENV)/bin/ruff format --check .
	@echo "== mypy";           $(VENV)/bin/mypy
	@echo "== import contracts"; $(VENV)/bin/lint-imports

check: install-dev model
	@echo "== pytest"
	@OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadgroup $(PYTEST_ARGS)

bench: install-dev model
	@$(PY) -m blink_core.bench
	@$(PY) -m verification.benchmarks.decode --model "$(or $(MODEL),$(DEFAULT_MODEL))"
	@$(PY) -m verification.benchmarks.lockstep
	@$(PY) -m verification.benchmarks.explorer
	@$(PY) -m verification.benchmarks.trace
	@$(PY) -m verification.benchmarks.linearisability
	@$(PY) -m verification.benchmarks.kv_sanitizer --model "$(or $(MODEL),$(DEFAULT_MODEL))"

# Smoke profiles with different seeds, SIDE of them at once; RUNS=20 takes an hour on two cores.
RUNS ?= 20
SIDE ?= 1
flakes: install-verify model
	@$(PY) -m verification.benchmarks.flakes --runs $(RUNS) --jobs $(SIDE) --model "$(or $(MODEL),$(DEFAULT_MODEL))"

clean:
	rm -rf build allure-results .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
