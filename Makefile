# The commands of this project. Each one first sets up what it needs; a second run finds it there.

PYTHON := .venv/bin/python
# Daemons start again and again: what they are compiled to is kept, also where the environment has Python write none of it.
unexport PYTHONDONTWRITEBYTECODE
# Two of them left two cores idle for a third of the time: tests wait for daemons, and leases, and platforms.
PROCESSES := 3
.DEFAULT_GOAL := help
.PHONY: help demo test quick soak coverage bench docs check setup proto clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: .venv/.ready-demo ## Train a small model over three emulated regions (DATA=DIR for MNIST's files)
	@.venv/bin/geofed demo $(if $(DATA),--data "$(DATA)")

test: .venv/.ready-dev ## Run all that must hold, in three processes (PYTEST=ARGUMENTS for pytest, in one)
	@$(PYTHON) -m pytest $(or $(PYTEST),-n $(PROCESSES))

quick: .venv/.ready-dev ## Run what starts no process, with few examples, until something fails (PYTEST=MORE ARGUMENTS)
	@$(PYTHON) -m pytest -n 3 -x -m "not processes and not slow" --hypothesis-profile=quick $(PYTEST)

soak: .venv/.ready-dev ## Run all again and again, with many examples and random kills (SECONDS=28800 SEED=N PYTEST=TESTS)
	@$(PYTHON) tests/soak.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(PYTEST)

coverage: .venv/.ready-dev ## Run all tests and tell which branches none of them takes (PYTEST=ARGUMENTS for pytest)
	@$(PYTHON) -m pytest -n $(PROCESSES) --cov --cov-report=term $(PYTEST)

bench: .venv/.ready-dev ## List the benchmarks, or run one: make bench NAME (ARGS=--quick)
	@$(PYTHON) tests/bench$(if $(BENCH),/$(BENCH).py) $(ARGS)

docs: .venv/.ready-dev ## Write the references of job and region file, and build the site in .site; a dead link is an error
	@$(PYTHON) -m deploy.reference
	@.venv/bin/zensical build --strict --clean

ifeq (bench,$(firstword $(MAKECMDGOALS)))
# What follows `bench` is the name of one, not another goal.
BENCH := $(wordlist 2,2,$(MAKECMDGOALS))
$(eval $(BENCH):;@:)
endif

check: .venv/.ready-dev ## Lint, types, import rules, and whether generated code is up to date
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@.venv/bin/lint-imports
	@PYTHON=$(PYTHON) sh proto/check.sh

setup: .venv/.ready-dev ## Install everything for development

proto: .venv/.ready-dev ## Generate the wire code again
	@PYTHON="$(CURDIR)/$(PYTHON)" sh proto/generate.sh

clean: ## Remove the virtual environment and all state
	rm -rf .venv .geofed .site .cache

.venv/.ready-demo .venv/.ready-dev: .venv/.ready-%: pyproject.toml deploy/setup.sh deploy/constraints.txt
	@sh deploy/setup.sh $*
	@touch $@
	@if [ $* = dev ]; then touch .venv/.ready-demo; fi
