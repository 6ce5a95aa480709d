# Every target sets up what it needs: the first one makes .venv and installs into it, later ones find it ready.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
INTEGRATIONS := .venv-integrations
OTHER_TORCH := .venv-torch-$(TORCH)
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo --constraint constraints/cpu.txt)
# `make demo TORCH_INDEX=ADDRESS` looks for torch at that package index too: PyTorch's own for CPUs, whose builds are smaller
# by gigabytes than those that pip finds for Linux by itself. pip takes the +cpu build of a version before the plain one.
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# warnings are errors, but for torch's own about numpy, which is not there
STRICTLY := -W error -W 'ignore:Failed to initialize NumPy'

.PHONY: demo test test-all test-torch fingerprint test-integrations dist check docs format bench report clean

demo: $(READY)
	$(BIN)/flatmin demo

# a file stays with one process, so that what its tests share is made once; bytecode is kept, so that the many processes
# that tests start need not compile
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

# The full product of every law's cases, of which `make test` runs every pair of values. For a release, and on a GPU.
test-all: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile -m ""

# The tests with another version of torch, in an environment of its own: `make test-torch TORCH=2.11.0`. Before a release,
# with the oldest version that is supported and the newest there is. Without a package index that has CPU builds, each takes
# gigabytes.
test-torch: export PYTHONDONTWRITEBYTECODE :=
test-torch: $(OTHER_TORCH)/.ready
	$(OTHER_TORCH)/bin/python -m pytest --numprocesses auto --dist loadfile

# What is computed, in 500 checksums: the first call records them, later ones name those that changed. For refactors.
fingerprint: $(READY)
	$(BIN)/python -m tests.support.fingerprint out/fingerprint.txt

# other people's trainers, processes that meet and processes that are killed, in an environment of their own; in the order
# of the files, because the clusters and the commands take longest: begun last, they would leave all cores but one idle
test-integrations: $(INTEGRATIONS)/.ready
	$(INTEGRATIONS)/bin/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder tests/integrations

# A wheel and a source archive in dist/, which rebuilds to the same bytes. Then what a user has, in an environment that
# begins empty: the wheel beside torch alone; the archive, built where there is no git; the laboratory as well.
USER_HAS := build/user
dist: export PYTHONPATH :=
dist: $(READY)
	rm -rf dist build/again
	mkdir -p build/again
	$(BIN)/python -m build --outdir dist
	tar -xzf dist/*.tar.gz -C build/again
	$(BIN)/python -m build --outdir build/again build/again/flatmin-*/
	$(BIN)/python -m tests.programs.dist_contents dist build/again
	$(BIN)/python -m venv --clear $(USER_HAS)
	$(USER_HAS)/bin/python -m pip install --quiet $(CONSTRAINTS) $(INDEX) dist/*.whl
	$(USER_HAS)/bin/python $(STRICTLY) -m tests.programs.installed_alone
	$(USER_HAS)/bin/python -m pip uninstall --quiet --yes flatmin
	PATH=$(CURDIR)/$(USER_HAS)/bin $(USER_HAS)/bin/python -m pip install --quiet --no-deps dist/*.tar.gz
	$(USER_HAS)/bin/python $(STRICTLY) -m tests.programs.installed_alone
	$(USER_HAS)/bin/python -m pip uninstall --quiet --yes flatmin
	$(USER_HAS)/bin/python -m pip install --quiet $(CONSTRAINTS) $(INDEX) "$$(echo dist/*.whl)[lab]"
	$(USER_HAS)/bin/python -m tests.programs.installed_lab
	rm -rf build/again $(USER_HAS)

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(MAKE) --no-print-directory docs

# site/index.html: opened as a file, it needs no server (the variable keeps an advertisement of the theme's quiet)
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(READY)
	$(BIN)/python benchmarks/oracles.py
	$(BIN)/python benchmarks/hessian_speed.py
	$(BIN)/python benchmarks/wrapper_overhead.py
	$(BIN)/python benchmarks/data_path.py
	$(BIN)/python benchmarks/landscape.py
	$(BIN)/python benchmarks/perturbed_precision.py
	$(BIN)/flatmin bench --quick

report: $(READY)
	$(BIN)/flatmin report results
	$(BIN)/python benchmarks/results_table.py

clean:
	rm -rf .venv $(INTEGRATIONS) .venv-torch-* build dist out site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# .venv/.ready has the tools, .venv-integrations/.ready the trainers as well
.venv/.ready: EXTRA := dev
$(INTEGRATIONS)/.ready: EXTRA := integrations
$(OTHER_TORCH)/.ready: EXTRA := dev
$(OTHER_TORCH)/.ready: CONSTRAINTS = "torch==$(or $(TORCH),$(error name a version of torch, as in `make test-torch TORCH=2.11.0`))"
.venv/.ready $(INTEGRATIONS)/.ready $(OTHER_TORCH)/.ready: pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit("flatmin needs Python 3.10 or newer, got " + sys.version.split()[0] + "; name one with `make PYTHON=python3.12`" if sys.version_info < (3, 10) else 0)'
	@echo 'installing into $(@D), this once: a few minutes'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet $(CONSTRAINTS) $(INDEX) --editable '.[$(EXTRA)]'
	@touch $@
