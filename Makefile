# `make demo` and `make test` need Python 3.11 or newer and make; what else they need, `make setup` puts into .venv.
# HF_ROCM_TUNE_TORCH=rocm7.2|cpu|cuda|keep|<requirement>|<index address> overrides which torch is installed.

PYTHON ?= python3
PYTEST_ARGS ?=
GPU_ARGS ?=
DRIFT_ARGS ?=
EVENING_ARGS ?=
VENV := .venv/bin/python
# Two workers, a file each at a time: session fixtures (models, a server of forked commands) are built once a worker. Three
# took as long on two cores (860 s and 866 s) and more processor time.
WORKERS := -n 2 --dist loadfile

.DEFAULT_GOAL := help
ROOM ?= transfer
.PHONY: help setup demo test unit test-long gpu evening drift lint checked simulator format wheel clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## create .venv with the right torch; quick when there is nothing to do
	@$(PYTHON) scripts/setup_env.py

demo: setup ## fine-tune a small model, with no network, and verify every byte that it trained on
	@$(VENV) -m hf_rocm_tune.demo

test: checked ## lint, type check, and every test that fits into 15 minutes on two cores
	@$(VENV) -m pytest $(WORKERS) $(PYTEST_ARGS)

unit: setup ## the tests of one room, without lint: make unit ROOM=cards
	@$(VENV) -m pytest $(WORKERS) tests/$(ROOM) $(PYTEST_ARGS)

test-long: checked ## the same, with the full matrices
	@$(VENV) -m pytest $(WORKERS) -m "long or not long" $(PYTEST_ARGS)

# Not after `setup`: it takes the torch that is there. GPU_ARGS="--wheels DIRECTORY" brings what that Python lacks.
gpu: ## what only a card can show, in ten minutes; results to benchmarks/results
	@$(if $(wildcard $(VENV)),$(VENV),$(PYTHON)) scripts/gpu.py $(GPU_ARGS)

# EVENING_ARGS="--minutes 5 --dataset my_chats.jsonl" and others of scripts/evening.py; docs/first_evening.md says more.
evening: setup ## the first evening with a card: doctor, make gpu, a recipe; one archive to send
	@$(VENV) scripts/evening.py $(EVENING_ARGS)

# DRIFT_ARGS="--only newest" and others of scripts/drift.py; writes docs/compatibility.md.
drift: setup ## other versions of the libraries: seams, tests, injected faults; ten minutes each
	@$(VENV) scripts/drift.py $(DRIFT_ARGS)

lint: setup ## ruff and mypy
	@$(VENV) -m ruff check .
	@$(VENV) -m ruff format --check .
	@$(VENV) -m mypy

# A core checks types while the other one compiles what executes the card's code in tests.
checked: setup
	@$(MAKE) --no-print-directory -j 2 lint simulator

simulator: setup
	@$(VENV) -m tests.simcard

format: setup ## let ruff format the code and sort the imports
	@$(VENV) -m ruff check --fix .
	@$(VENV) -m ruff format .

wheel: setup ## build the wheel into dist/
	@$(VENV) -m hatchling build -t wheel -d dist

clean: ## remove what was built, .venv included
	rm -rf .venv build dist demo-output .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find hf_rocm_tune scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
