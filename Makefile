# make demo                    train a small model twice, stock and with the flag, and compare
# make test                    run the tests, with the newest supported releases
# make test-versions           run the core tests with each set of releases in tests/versions
# make test-axolotl            train with the real Axolotl, the flag off and on
# make test-llamafactory       train with the real LLaMA-Factory, the flag off and on
# make test-llamafactory-webui the same from its web UI, in a browser (Debian's chromium)
# make architectures-spread    patch and train a step of 25 model types that differ most
# make lint                    ruff and mypy
#
# Each sets up what it needs in $(VENV) first: Python 3.11+ with pip is all that has to be there.

PYTHON ?= python3
VENV ?= .venv

# The release that slothplug is tested on. On Linux the package index may answer with a build of several GB that
# carries CUDA; on a machine without a GPU PyTorch's CPU build does the same here:
#   make demo TORCH="torch==2.13.0 --index-url <the index of CPU builds that pytorch.org names>"
TORCH ?= torch==2.13.0

# As many test processes as there are cores; each computes on one thread.
WORKERS ?= auto
TESTS ?= tests

# The releases of transformers, PEFT, TRL and accelerate that the tests run with.
REQUIREMENTS ?= tests/versions/newest.txt
VERSIONS ?= oldest llamafactory axolotl newest

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

AXOLOTL ?= axolotl==0.19.0
LLAMAFACTORY ?= llamafactory==0.9.5

.PHONY: demo test test-versions test-axolotl test-llamafactory test-llamafactory-webui architectures-spread lint clean

demo: $(VENV)/.demo
	$(VENV)/bin/slothplug demo

test: $(VENV)/.development
	$(VENV)/bin/python -m pytest -n $(WORKERS) $(TESTS)

test-versions: $(VERSIONS:%=test-versions-%)

# Each set has a virtual environment of its own.
test-versions-%: tests/versions/%.txt
	$(MAKE) --no-print-directory test VENV=$(VENV)-$* REQUIREMENTS=$< TESTS='-m core tests'

# Axolotl pins other releases than the rest, so it has an environment of its own.
test-axolotl:
	$(MAKE) --no-print-directory $(VENV)-with-axolotl/.axolotl VENV=$(VENV)-with-axolotl
	$(VENV)-with-axolotl/bin/python -m pytest -n 2 --dist loadfile tests/axolotl

# So does LLaMA-Factory.
test-llamafactory:
	$(MAKE) --no-print-directory $(VENV)-with-llamafactory/.llamafactory VENV=$(VENV)-with-llamafactory
	$(VENV)-with-llamafactory/bin/python -m pytest -n 2 --dist loadfile tests/llamafactory

test-llamafactory-webui:
	$(MAKE) --no-print-directory $(VENV)-with-llamafactory/.webui VENV=$(VENV)-with-llamafactory
	$(VENV)-with-llamafactory/bin/python -m pytest -m webui -rP tests/llamafactory

architectures-spread: $(VENV)/.development
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m "" tests/architectures

lint: $(VENV)/.development
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) $(VERSIONS:%=$(VENV)-%) $(VENV)-with-axolotl $(VENV)-with-llamafactory
	rm -rf build dist slothplug-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

# pip from 25.1 on knows dependency groups.
$(VENV)/.torch: Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "slothplug needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) install --editable '.[demo]'
	touch $@

$(VENV)/.development: $(VENV)/.torch pyproject.toml $(REQUIREMENTS)
	$(PIP) install --requirement $(REQUIREMENTS) --editable '.[demo,triton]' --group test --group lint
	touch $@

# Without its dependencies: the file has those that training imports, a quarter of what it demands.
$(VENV)/.axolotl: $(VENV)/.torch pyproject.toml tests/axolotl/requirements.txt
	$(PIP) install --requirement tests/axolotl/requirements.txt --editable .
	$(PIP) install --no-deps $(AXOLOTL)
	touch $@

# Without its dependencies, too. It imports torchaudio on every run and calls it for sound only; where no torchaudio
# loads beside this torch, an empty module lets it be imported.
$(VENV)/.llamafactory: $(VENV)/.torch pyproject.toml tests/llamafactory/requirements.txt
	$(PIP) install --requirement tests/llamafactory/requirements.txt --editable .
	$(PIP) install --no-deps $(LLAMAFACTORY)
	$(VENV)/bin/python -c 'import torchaudio' 2>/dev/null || \
		touch $$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio.py
	touch $@

$(VENV)/.webui: $(VENV)/.llamafactory tests/llamafactory/requirements-webui.txt
	$(PIP) install --requirement tests/llamafactory/requirements-webui.txt
	command -v chromedriver chromium || apt-get install --yes chromium chromium-driver
	touch $@
