# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint notebook docs benchmark clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli,hf,highs,plot,notebook,examples,docs,dev]'
	touch $@

demo: $(VENV)/.installed  ## the end-to-end example
	$(BIN)/python examples/transformer.py

test: $(VENV)/.installed  ## everything that CI proves about the code
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

notebook: $(VENV)/.installed  ## run the notebooks, in copies under out/
	for n in notebooks/*.ipynb; do $(BIN)/python notebooks/execute.py $$n out/$$(basename $$n) || exit 1; done

docs: $(VENV)/.installed  ## build the documentation under site/
	$(BIN)/python -m mkdocs build --strict

benchmark: $(VENV)/.installed
	$(BIN)/python -m benchmarks.planning_time

clean:
	rm -rf $(VENV) out site build dist *.egg-info
