# make demo   train, deploy and run a small fleet on this machine (sets itself up)
# make test   lint, types and every test (sets itself up)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types unit bench clean
.DELETE_ON_ERROR:

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "splitedge needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes first: any package that pulled it in unpinned would bring CUDA along
$(VENV)/installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing splitedge[$*] into $(VENV), a few minutes the first time"
	@$(PIP) torch
	@$(PIP) --editable '.[$*]'
	@touch $@

demo: $(VENV)/installed-server
	@$(BIN)/splitedge demo $(ARGS)

bench: $(VENV)/installed-server
	@$(BIN)/splitedge bench $(ARGS)

test: lint types unit

lint: $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	@$(BIN)/mypy

unit: $(VENV)/installed-dev
	@$(BIN)/python -m pytest $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info splitedge-demo
