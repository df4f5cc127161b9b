# Every target sets up what it needs first (tools/setup.sh); a second run finds nothing to do in under a second.
# ARGS goes to the command behind the target:  make test ARGS="tests/unit -x"
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-images torture torture-all check fix dev bench lock

BIN := .venv/bin
# Where it is set, each of the programs that tests start, hundreds of them, would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Test files are dealt out to one process per core, in their order: cheap suites first, and the fixtures of a file in one process.
# Whoever wants one process (a debugger, a quieter host) says WORKERS=0.
WORKERS ?= auto
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 15

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

setup:  ## packages, .venv, the base image
	@tools/setup.sh system venv image

demo: setup  ## run the main job: a machine that sleeps and wakes
	@$(BIN)/perdure demo $(ARGS)

test:  ## set up and pass every test
	@tools/setup.sh system qemu10 venv image
	@$(PYTEST) $(ARGS)

test-long: ## the long form of the proofs that 'make test' has in short
	@tools/setup.sh system qemu10 venv image
	@PERDURE_TEST_LONG=1 $(PYTEST) -m "(long or slow) and not images" $(ARGS)

# One after the other: each has a machine or two that want all of the host.
test-images: ## build the images besides base, and prove them
	@tools/setup.sh system qemu10 venv image
	@$(BIN)/python -m pytest -n 0 -v --durations 0 --durations-min 15 -m images tests/images $(ARGS)

torture:  ## faults, recoveries and all invariants, over small machines; ARGS="--seed 7 --rounds 50"
	@tools/setup.sh system venv
	@$(BIN)/python -m tests.torture $(ARGS)

torture-all: ## the same for long, and with virtual machines
	@tools/setup.sh system qemu10 venv image
	@$(BIN)/python -m tests.torture --all --rounds 1000 $(ARGS)

check:  ## style, types, layers, generated files
	@tools/setup.sh venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@for tool in unasync openapi settings_doc; do \
	    if [ -f tools/$$tool.py ]; then echo "$(BIN)/python tools/$$tool.py --check"; $(BIN)/python tools/$$tool.py --check || exit 1; fi; \
	done

fix:  ## format, mend what ruff can, generate files anew
	@tools/setup.sh venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@for tool in unasync openapi settings_doc; do \
	    if [ -f tools/$$tool.py ]; then echo "$(BIN)/python tools/$$tool.py"; $(BIN)/python tools/$$tool.py || exit 1; fi; \
	done

dev: setup  ## a server in the foreground, its data below .dev
	@PERDURE_HOME=$${PERDURE_HOME:-$(CURDIR)/.dev} PERDURE_IMAGE_DIR=$${PERDURE_IMAGE_DIR:-$$($(BIN)/python -c 'from perdure.core.config import Settings; print(Settings().images)')} \
	    $(BIN)/perdure up $(ARGS)

bench: setup  ## measure this machine
	@$(BIN)/perdure bench wake $(ARGS)
	@$(BIN)/perdure bench snapshots $(ARGS)

lock:  ## resolve requirements.lock again after a change of pyproject.toml; LOCK=--upgrade moves every pin
	@tools/setup.sh venv
	$(BIN)/uv pip compile -q --universal --generate-hashes --no-emit-index-url --no-header $(LOCK) \
	    pyproject.toml --group dev -o requirements.lock
	@tools/setup.sh venv
