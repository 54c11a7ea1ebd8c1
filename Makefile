# make demo   train, deploy and run a small fleet on this machine (sets itself up)
# make test   lint, types and every test (sets itself up)
# make faults-training   kill trainer and devices at many more points, drawn at random
# make adopt-cuts   cut the nine graphs of the onnx wheel at every place, against the whole
# make bench-flower   our simulation beside Flower's, which gets an environment of its own
PYTHON ?= python3
VENV ?= .venv
FLOWER_VENV ?= .venv-flower
# Processes that share the tests, file by file; 0 runs all in one.
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: adopt-cuts demo test lint types unit bench bench-flower faults-training clean
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

adopt-cuts: $(VENV)/installed-server
	@$(BIN)/python -m benchmarks.adopt_cuts --every

bench-flower: $(VENV)/installed-server $(FLOWER_VENV)/installed
	@$(BIN)/python -m benchmarks.flower compare --flower $(FLOWER_VENV)/bin/python $(ARGS)

# the newest Flower whose needs can be met, and what it asks for; torch is the one we measure with
$(FLOWER_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLOWER_VENV)
	@$(FLOWER_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	@$(FLOWER_VENV)/bin/python -m pip install --quiet --editable '.[train]' 'flwr[simulation]' \
		scikit-learn
	@touch $@

test: lint types unit

lint: $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

types: $(VENV)/installed-dev
	@$(BIN)/mypy

unit: $(VENV)/installed-dev
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

faults-training: $(VENV)/installed-dev
	@$(BIN)/python -m pytest tests/training/fleet/test_kills.py --hypothesis-profile=faults \
		--timeout=1800 $(ARGS)

clean:
	rm -rf $(VENV) $(FLOWER_VENV) build dist *.egg-info splitedge-demo
