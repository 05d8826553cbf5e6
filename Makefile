# Everything runs in .venv, which the first target that needs it creates; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
# Of `make bench`: what to measure (targets or all), and the minutes after which no further round is begun.
PROFILE ?= targets
MINUTES ?= 80
# For pip and the builds that it starts: an index that pauses or is away for a moment ends nothing.
export PIP_DEFAULT_TIMEOUT ?= 60
export PIP_RETRIES ?= 10

.PHONY: demo test check lint types imports bench clean

demo: .venv/ready
	$(BIN)/cacheloader demo

test: .venv/ready
	$(BIN)/python -m pytest -q --numprocesses=auto --maxprocesses=4 --dist=loadfile

check: lint types imports test

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/ready
	$(BIN)/mypy

imports: .venv/ready
	$(BIN)/lint-imports

bench: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group bench
	$(BIN)/python -m benchmarks.peers.environments
	$(BIN)/python -m benchmarks --profile $(PROFILE) --budget $(MINUTES)

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[demo]" --group dev
	touch $@

clean:
	rm -rf .venv .demo .bench .bench-peers dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
