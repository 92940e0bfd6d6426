PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHARED := -n 2 --dist worksteal
LOWEST := .venv-lowest
SITE := .venv-site

.PHONY: install llama-cpp quickstart test test-all test-ui test-lowest test-gpu lint site release-check image-check clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Built from source once, for about ten minutes; what needs it is skipped, and named, where it cannot be
llama-cpp: $(VENV)/.llama-cpp

$(VENV)/.llama-cpp: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt llama-cpp-python \
		|| echo "llama.cpp cannot be built here (a C++ compiler is needed): tests marked llama_cpp are skipped"
	touch $@

quickstart: install
	$(BIN)/chronicals quickstart
	@echo "'chronicals' is in $(BIN): run '. $(BIN)/activate' to find it by its name"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(SHARED) -m "not long and not browser" --sample

test-all: lint llama-cpp
	$(BIN)/python -m pytest $(SHARED)

# In Chromium as Debian has it (apt-get install chromium); without it the tests are skipped, and named
test-ui: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt playwright
	$(BIN)/python -m pytest -n 0 -m browser tests/ui

test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest $(SHARED) -m "not long and not browser" --sample

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[dev]'
	touch $@

test-gpu: install
	$(BIN)/python tests/run_on_card.py

# Into build/site; every link is followed. It takes a minute, so it is no part of make test
site: $(SITE)/.installed
	$(SITE)/bin/python .ci/site.py

$(SITE)/.installed: .ci/site-requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --requirement .ci/site-requirements.txt
	touch $@

# What the workflow does on a tag, up to the upload: a wheel, installed in an empty environment, runs
release-check: install
	$(BIN)/python .ci/release.py

# The Dockerfile's commands in an empty folder, without a container; as another user where root starts it
image-check: install
	$(BIN)/python .ci/image.py

clean:
	rm -rf $(VENV) $(LOWEST) $(SITE) build dist
