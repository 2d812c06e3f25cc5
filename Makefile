# `make train` and `make test` set up .venv first; PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/doom.py

.PHONY: train test test-learn lint clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[doom,test]'
	touch $@

train: $(VENV)/installed
	$(BIN)/python launch.py --config=$(CONFIG)

test: $(VENV)/installed
	$(BIN)/python -m pytest tests

test-learn: $(VENV)/installed
	$(BIN)/python -m pytest tests -m learn

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV)
