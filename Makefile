# Everything a newcomer needs, in an environment of its own that is made once and used again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One process a core; a free one takes tests from one that is behind.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
# How long `make fuzz` looks: minute (the same examples every time) or hour (new ones every time).
PROFILE ?= minute

.PHONY: demo test slow ray fuzz lint types clean

demo: $(STAMP)
	$(BIN)/fitune demo

test: $(STAMP)
	$(PYTEST)

# The larger grids of the laws, about half an hour more.
slow: $(STAMP)
	$(PYTEST) -m slow

# Runs on a Ray cluster that is started here, about three minutes. One process: there is one cluster.
ray: $(STAMP)
	$(BIN)/python -m pytest tests/ray -m ray

# Random damage to recipes, model folders, adapters, rows, templates and runs: each ends well or in an error for people.
fuzz: $(STAMP)
	$(PYTEST) tests/fuzz -m fuzz --hypothesis-profile=$(PROFILE)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch alone and first, pinned: a range would let the installer take another, larger build.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
