# `make train` needs nothing but Python 3.11 or newer. Another interpreter: make train PYTHON=python3.12
# Another torch, in an environment of its own: make test TORCH=2.15

PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
# Compiling every module of torch takes longer than the install itself. A first import compiles those it needs,
# here on one core while pip works on another.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
  $(if $(TORCH),"torch==$(TORCH).*",--constraint constraints.txt)

# Bytecode is kept: without it, each process that a run or a test starts would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-long torture fuzz check docs format clean

train: $(VENV)/installed
	$(BIN)/fullshard train

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not long"

test-long: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q

torture: $(VENV)/installed-dev
	$(BIN)/python -m tests.faults.torture

fuzz: $(VENV)/installed-dev
	$(BIN)/python -m tests.fuzz

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/architecture

# The pages of the site keep their places in the repository, so that their links hold in both.
docs: $(VENV)/installed-dev
	rm -rf build/pages && mkdir -p build/pages
	git ls-files -z '*.md' '*.py' '*.toml' docs bench deploy examples CITATION.cff LICENSE | xargs -0 tar -cf - | tar -xf - -C build/pages
	$(BIN)/python -m mkdocs build --quiet
	cp llms.txt build/site/ && cd build/pages && find . -name '*.md' -exec cp --parents -t ../site {} +

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-torch-* build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fullshard needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1 | head -n 1)" >&2; \
	  echo "  try: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# Stamps: an environment that is there is used again, and completed when the dependencies change.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) numpy torch
	$(BIN)/python -c "import torch.distributed.fsdp, torch.distributed.checkpoint, torch._dynamo" & \
	  $(PIP_INSTALL) -e . && wait
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[dev]"
	@# Tests turn warnings into errors, also those of a package that is compiled in them.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@ $(VENV)/installed
