# pip installs everything into .venv, at the versions in constraints.txt. To use an interpreter that already has the
# dependencies, name it: make test-gpu PYTHON=python3
PYTHON ?= .venv/bin/python
installed := $(if $(filter .venv/bin/python,$(PYTHON)),.venv/installed)
export PIP_CONSTRAINT = $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: train test test-all test-gpu check docs format clean

train: $(installed)
	$(if $(installed),.venv/bin/germline,$(PYTHON) -m germline) train digits --baseline

# Runs what needs one process, on all cores.
test: $(installed)
	$(PYTHON) -m pytest -q -m "not slow" -n auto

# Runs every test: processes, faults and interpreted GPU kernels as well.
test-all: $(installed)
	$(PYTHON) -m pytest -q -n auto

# Runs the tests with the kernels compiled for the GPU, and every device test on the GPU.
test-gpu: $(installed)
	$(PYTHON) -c "import torch; assert torch.cuda.is_available(), 'There is no CUDA device here.'"
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -q

check: $(installed)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as run; run()"

# Builds the site in site/; a warning, such as a link that leads nowhere, is an error.
docs: $(if $(installed),.venv/docs-installed)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

.venv/docs-installed: .venv/installed
	.venv/bin/python -m pip install --quiet --editable ".[docs]"
	touch $@

format: $(installed)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

.venv/installed: pyproject.toml constraints.txt
	python3 -c "import sys; assert sys.version_info >= (3, 11), 'Germline needs Python 3.11 or later.'"
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
