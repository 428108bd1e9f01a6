# Each target sets up what it needs. PYTHON chooses the interpreter (3.11 or later).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# `make demo` needs a part of what development needs, and a first run should be short.
DEMO_READY := $(VENV)/.ready-demo
DEV_READY  := $(VENV)/.ready-dev

.DEFAULT_GOAL := help
.PHONY: help demo test check bench faults clean

help:
	@echo "make demo    run the demo on an embedded MongoDB   (URI=mongodb://… your own server, INPUT=file.jsonl your own requests)"
	@echo "make test    run the tests                         (ARGS='-k name' for a part of them)"
	@echo "make check   lint, format, types, layers"
	@echo "make bench   measure all that docs/benchmarks.md shows (ARGS='append' prints a part)"
	@echo "make faults  break real processes for a while      (SECONDS=600 for how long, SEED=7 to repeat a run)"
	@echo "make clean   remove what these targets made"

demo: $(DEMO_READY)
	$(BIN)/statelayer demo $(if $(URI),--uri '$(URI)') $(if $(INPUT),--input '$(INPUT)') $(ARGS)

test: $(DEV_READY)
	$(BIN)/python -m pytest $(ARGS)

check: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(DEV_READY)
	$(BIN)/python -m benchmarks $(or $(ARGS),--write docs/benchmarks.md)

faults: $(DEV_READY)
	cd tests && ../$(BIN)/python -m faults --seconds $(or $(SECONDS),120) $(if $(SEED),--seed $(SEED)) $(ARGS)

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks build dist

$(DEMO_READY): pyproject.toml | $(BIN)/pip
	@echo 'Installing into $(VENV) …'
	@$(PIP) install --editable '.[embedded,cli]'
	@touch $@

$(DEV_READY): pyproject.toml | $(BIN)/pip
	@echo 'Installing into $(VENV) …'
	@$(PIP) install --editable '.[dev]'
	@touch $@ $(DEMO_READY)

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "This project needs Python 3.11 or later; '$(PYTHON)' is not. Name one: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot create a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
