# Every target sets up what it needs: the first one makes .venv and installs into it, later ones find it ready.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
INTEGRATIONS := .venv-integrations
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo --constraint constraints/cpu.txt)

.PHONY: demo test test-integrations check docs format bench report clean

demo: $(READY)
	$(BIN)/flatmin demo

test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto

# other people's trainers, processes that meet and processes that are killed, in an environment of their own
test-integrations: $(INTEGRATIONS)/.ready
	$(INTEGRATIONS)/bin/python -m pytest --numprocesses auto --dist loadfile tests/integrations

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(MAKE) --no-print-directory docs

# site/index.html: opened as a file, it needs no server (the variable keeps an advertisement of the theme's quiet)
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(READY)
	$(BIN)/python benchmarks/oracles.py
	$(BIN)/python benchmarks/wrapper_overhead.py
	$(BIN)/python benchmarks/data_path.py
	$(BIN)/python benchmarks/landscape.py
	$(BIN)/python benchmarks/perturbed_precision.py
	$(BIN)/flatmin bench --quick

report: $(READY)
	$(BIN)/flatmin report results
	$(BIN)/python benchmarks/results_table.py

clean:
	rm -rf .venv $(INTEGRATIONS) build dist out site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# .venv/.ready has the tools, .venv-integrations/.ready the trainers as well
.venv/.ready: EXTRA := dev
$(INTEGRATIONS)/.ready: EXTRA := integrations
.venv/.ready $(INTEGRATIONS)/.ready: pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit("flatmin needs Python 3.10 or newer, got " + sys.version.split()[0] + "; name one with `make PYTHON=python3.12`" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $(CONSTRAINTS) --editable '.[$(EXTRA)]'
	@touch $@
