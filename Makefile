# make demo   train, deploy and run a small fleet on this machine (sets itself up)
# make test   lint, types and every test (sets itself up)
# make faults   the full figures under faults; ARGS names some of them (needs hours, and root for one)
# make docs   build the site of the documents into site/
# make adopt-cuts   cut the nine graphs of the onnx wheel at every place, against the whole
# make arm64   the agent in an emulated arm64 system, against a server here (root, Debian; minutes)
# make installations   build and use the images of deploy/, and the services under a booted systemd (as arm64)
# make bench-peers   our server beside LitServe, Ray Serve and plain FastAPI, which get an environment of their own
# make bench-flower   our simulation beside Flower's, which gets an environment of its own
# make paper-plots   the curves and tables of docs/methods and docs/index.md, from the committed reports
# make cost-plots   how cost grows: plots and slopes, from the committed reports
# make pictures   the pictures of the dashboard in docs/pictures (needs Chromium)
PYTHON ?= python3
VENV ?= .venv
FLOWER_VENV ?= .venv-flower
PEERS_VENV ?= .venv-peers
# Processes that share the tests, file by file; 0 runs all in one. Many tests wait for a broker, a
# browser or a clock: three keep two cores at work.
WORKERS ?= 3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: adopt-cuts arm64 installations demo docs test lint types unit bench bench-flower bench-peers cost-plots faults paper-plots pictures clean
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

# the site of the documents, in site/, without the network
docs: $(VENV)/installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

adopt-cuts: $(VENV)/installed-server
	@$(BIN)/python -m benchmarks.adopt_cuts --every

arm64: $(VENV)/installed-dev
	@$(BIN)/python -m benchmarks.install.arm64 $(ARGS)

installations: $(VENV)/installed-dev
	@$(BIN)/python -m benchmarks.install.installations $(ARGS)

bench-flower: $(VENV)/installed-server $(FLOWER_VENV)/installed
	@$(BIN)/python -m benchmarks.flower compare --flower $(FLOWER_VENV)/bin/python $(ARGS)

# the newest Flower whose needs can be met, and what it asks for; torch is the one we measure with
$(FLOWER_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLOWER_VENV)
	@$(FLOWER_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	@$(FLOWER_VENV)/bin/python -m pip install --quiet --editable '.[train]' 'flwr[simulation]' \
		scikit-learn
	@touch $@

bench-peers: $(VENV)/installed-server $(PEERS_VENV)/installed
	@$(BIN)/python -m benchmarks.peers --peers $(PEERS_VENV)/bin/python $(ARGS)

# uvicorn[standard]: the parser and the loop in C that LitServe brings, for plain FastAPI too
$(PEERS_VENV)/installed: constraints.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	@$(PEERS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt fastapi litserve \
		numpy onnxruntime orjson 'ray[serve]' 'uvicorn[standard]'
	@touch $@

# mypy takes most of a minute of one core, and the tests leave room for it
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types unit

lint: $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/hadolint deploy/*.Dockerfile
	@$(BIN)/kubernetes-validate --strict --quiet deploy/kubernetes/*.yaml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec deploy/compose.yaml

types: $(VENV)/installed-dev
	@$(BIN)/mypy

# hundreds of processes start: each would compile the product anew where bytecode is not kept.
# Files are handed out in the order of tests/conftest.py, the long ones first.
unit: $(VENV)/installed-dev
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
		--no-loadscope-reorder $(ARGS)

faults: $(VENV)/installed-dev
	@$(BIN)/python -m benchmarks.faults figures $(ARGS)

paper-plots: $(VENV)/installed-dev
	@$(BIN)/python -m benchmarks.pages

cost-plots: $(VENV)/installed-dev
	@$(BIN)/python -m benchmarks.cost

pictures: $(VENV)/installed-dev
	@$(BIN)/python -m benchmarks.dashboard.pictures $(ARGS)

clean:
	rm -rf $(VENV) $(FLOWER_VENV) $(PEERS_VENV) build dist *.egg-info splitedge-demo
