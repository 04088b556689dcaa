# Two commands matter: `make demo` and `make test`. Both set up what is missing.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
INSTALLED = test -x $(BIN)/polymorph || { echo "Nothing is set up here yet: run make setup." >&2; exit 2; }
WORKERS ?= 2
ALONE := tests/integration/evaluator
QUICK ?=
export QUICK

.PHONY: help setup demo up down status doctor test test-fast test-slow test-compat test-gpu-kernels lint types format models asyncapi lock bench-gateway bench-kernels bench-operations bench-slots bench-settings bench-hotload bench-gpu clean

help: ## Show this help
	@awk 'BEGIN {FS = ":.*?## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-zA-Z_-]+:.*?## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Use it
demo: setup ## The loop on this machine: real vLLM, real traffic, a kernel promoted while it serves
	@$(BIN)/python -m benchmarks.demo $(ARGS)

up: setup ## Start embedded mode in the foreground (ARGS="--workers 2 --port 8000")
	@$(BIN)/polymorph up $(ARGS)

down: ## Stop it
	@$(INSTALLED)
	@$(BIN)/polymorph down $(ARGS)

status: ## Say what runs
	@$(INSTALLED)
	@$(BIN)/polymorph status $(ARGS)

##@ Set it up
doctor: ## Check what a start would trip over (standard library only)
	@$(PYTHON) libs/polymorph/embedded/doctor.py $(ARGS)

setup: ## Install vLLM for the CPU and Polymorph into .venv, fetch SmolLM2; a no-op where nothing changed
	@$(PYTHON) libs/polymorph/embedded/doctor.py --skip port --skip model || { echo "Mend what is marked FAIL, then run make again." >&2; exit 2; }
	@$(PYTHON) setup/install.py

models: setup ## Train the small committed models again (seeded)
	@$(BIN)/python models/train.py --all

lock: ## Pin what .venv holds now (needs uv in it)
	@$(BIN)/python setup/lock.py

##@ Check it
test: setup ## All tests that run without containers, the real servers and the real engine among them
	@$(BIN)/python -m pytest -m "alone and not slow" --timeout 600 $(or $(ARGS),$(ALONE)) || test $$? = 5  # 5: ARGS name none of them
	@$(BIN)/python -m pytest -m "not alone and not slow" --timeout 600 -n $(WORKERS) $(ARGS)

test-slow: setup ## What takes minutes: two workers that restart in turn, a fleet under faults, engines with experts
	@$(BIN)/python -m pytest -m slow --timeout 900 $(ARGS)

test-fast: setup ## Only the quick ones: no server, no engine
	@$(BIN)/python -m pytest -m "not slow and not real and not engine" --timeout 120 -n $(WORKERS) $(ARGS)

test-compat: ## The hooks and a plain server in the release of vLLM before the newest (makes .venv-compat)
	@POLYMORPH_VENV=.venv-compat $(PYTHON) setup/install.py --without-model --instead requirements/compat.lock
	@PATH="$(CURDIR)/.venv-compat/bin:$$PATH" python -m pytest --timeout 600 tests/integration/plain $(ARGS)

test-gpu-kernels: setup ## Triton kernels without a GPU: interpreted, and compiled (makes .venv-triton)
	@$(BIN)/python setup/triton_environment.py
	@TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest tests/unit/gpu --timeout 600 -n $(WORKERS) $(ARGS)
	@.venv-triton/bin/python -m pytest tests/unit/gpu/test_gpu_kernels.py --timeout 600 -n $(WORKERS) $(ARGS)

lint: setup ## ruff, import-linter
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports

types: setup ## mypy --strict over libs, services and benchmarks
	@$(BIN)/mypy

format: ## Format the code
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format .

asyncapi: ## Write docs/events/asyncapi.yaml from the event types
	@$(BIN)/python -m polymorph.events.asyncapi docs/events/asyncapi.yaml

##@ Measure it (last line is one JSON object; QUICK=1 is short)
bench-gateway: setup ## What the gateway adds to a request
	@$(BIN)/python benchmarks/gateway_overhead.py

bench-kernels: setup ## Linear kernels against the engine's own
	@$(BIN)/python benchmarks/kernels_linear.py

bench-operations: setup ## Every slot's native code against kernels of ours (ARGS="--op NAME")
	@$(BIN)/python -m benchmarks.operations $(ARGS)

bench-slots: setup ## What slots cost and gain beside Inductor's fusion (ARGS="--model models/NAME")
	@$(BIN)/python -m benchmarks.operations.engines $(ARGS)

bench-settings: setup ## Settings changed under load: what streams notice, how long each change takes
	@$(BIN)/python -m benchmarks.settings_change

bench-hotload: setup ## Kernels swapped under load, and what slots cost while nothing changes
	@$(BIN)/python -m benchmarks.hotload $(ARGS)

bench-gpu: ## Triton kernels swapped in captured CUDA graphs: for a machine with a GPU, torch and triton, without set-up
	@$(PYTHON) benchmarks/gpu_hotswap.py $(ARGS)

clean: ## Remove caches and the data of embedded mode (not .venv)
	@rm -rf .polymorph .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
