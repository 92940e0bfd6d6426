PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHARED := -n 2 --dist worksteal

.PHONY: install quickstart test test-all lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

quickstart: install
	$(BIN)/chronicals quickstart

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(SHARED) -m "not long"

test-all: lint
	$(BIN)/python -m pytest $(SHARED)

clean:
	rm -rf $(VENV) build dist
