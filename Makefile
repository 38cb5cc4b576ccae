# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Some containers forbid Python to write what it has compiled. Then every process compiles all that it imports of torch.
unexport PYTHONDONTWRITEBYTECODE
# Not every module of torch is imported: those that are, are compiled then.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# Files go to the next free process in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --rooms
MARKS := not slow

NOTEBOOKS := $(patsubst notebooks/%.ipynb,out/%.ipynb,$(wildcard notebooks/*.ipynb))

.PHONY: help demo quick test test-slow test-exhaustive test-torch lint size format notebook docs benchmark clean $(NOTEBOOKS)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV), about 2 GB: this takes one to five minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "1 of 2: torch"
	$(INSTALL) torch
	@echo "2 of 2: sacplan, and what its tests, notebooks and documentation need"
	$(INSTALL) --editable '.[hf,plot,notebook,examples,docs,dev]'
	@# What most processes import, compiled by one, before several do it at the same time.
	$(BIN)/python -W ignore -m tests.support.processes
	touch $@

demo: $(VENV)/.installed  ## the end-to-end example
	@echo "Running examples/transformer.py: half a minute to two minutes."
	$(BIN)/python examples/transformer.py

quick: $(VENV)/.installed  ## the invariants on tiny models, in about a minute
	$(PYTEST) tests/invariants -m "not slow"

test: $(VENV)/.installed  ## the tests, but for the slow ones
	$(PYTEST) -m "$(MARKS)"

test-slow: $(VENV)/.installed  ## the slow tests, one case of each, which CI runs too
	$(PYTEST) -m "slow and not exhaustive"

test-exhaustive: $(VENV)/.installed  ## all other cases of the slow tests, before a release (about half an hour)
	$(PYTEST) -m exhaustive

test-torch:  ## what holds with another torch: make test-torch TORCH=2.15.0
	test -n "$(TORCH)" || { echo "say which torch: make test-torch TORCH=2.15.0" >&2; exit 2; }
	test -d $(VENV)-$(TORCH) || $(PYTHON) -m venv $(VENV)-$(TORCH)
	$(VENV)-$(TORCH)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-$(TORCH)/bin/python -m pip install --quiet "torch==$(TORCH)" --editable '.[hf,plot,dev]'
	.ci/promises $(VENV)-$(TORCH)/bin/python

lint: $(VENV)/.installed  ## ruff and mypy, and the lines of code that each folder may have
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@.ci/size >/dev/null

size:  ## lines of code by folder, beside what each may have
	@.ci/size

format: $(VENV)/.installed  ## what ruff can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebook: $(NOTEBOOKS)  ## run the notebooks, in copies under out/; with -j 2, two at a time

$(NOTEBOOKS): out/%.ipynb: notebooks/%.ipynb $(VENV)/.installed
	$(BIN)/python notebooks/execute.py $< $@

docs: $(VENV)/.installed  ## build the documentation under out/site/
	$(BIN)/python -m mkdocs build --strict

benchmark: $(VENV)/.installed  ## how long planning takes
	$(BIN)/python -m benchmarks.planning_time

clean:  ## what make and the tools leave behind
	rm -rf $(VENV) $(VENV)-* out site build dist *.egg-info
