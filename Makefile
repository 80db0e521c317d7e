# make demo: explain the bundled photographs.   make test: lint, types and tests.   make test-all: the long ones too.
# make test-cpus: the numeric tests as other processors would run them, and the margins they leave.
# make test-page: the page in a browser, its API under random, hostile and many clients. SOAK=no leaves out the many.
# make mutants: 100 random faults in the engine, metrics and studies; lists those that no test notices. MUTANTS=30: fewer.
# make docs: the documentation, into build/docs/html; tutorials are executed, links are checked, warnings are errors.
# make figures: draw the pictures of README and docs again.
# make dist: wheel and source archive, checked.   make test-wheel: that wheel alone in an empty environment.
# make test-versions: the lowest and highest versions of what is required.   make release: is all ready? It uploads nothing.
PYTHON ?= python3
VENV   ?= .venv
MUTANTS ?= 100
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test test-all test-cpus test-page test-transformers4 test-accelerator test-wheel test-versions mutants \
  lint bench figures docs dist release clean

demo: $(VENV)/.stamp-run
	$(BIN)/patchlight demo

test: lint $(VENV)/.stamp-browser
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not page and not accelerator"

test-all: lint $(VENV)/.stamp-browser
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not page and not accelerator"
	$(MAKE) test-page
	$(MAKE) test-transformers4
	$(MAKE) test-cpus
	$(MAKE) docs

test-page: $(VENV)/.stamp-browser
	$(BIN)/python -m pytest -rs tests/web
	test "$(SOAK)" = no || $(BIN)/python -m tests.web.soak

test-transformers4: $(VENV)/.stamp-dev
	$(PIP) install --target $(VENV)/transformers4 --upgrade --no-deps transformers==4.46.3 huggingface_hub==0.36.0 \
	  tokenizers==0.20.3 requests==2.34.2 urllib3==2.8.0 charset-normalizer==3.5.2 certifi==2026.10.18
	PYTHONPATH=$(VENV)/transformers4 $(BIN)/python -m pytest tests/anatomy tests/methods/test_contract.py -k "hf- or transformers" -m "not accelerator"

test-cpus: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.cpus

test-wheel: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest tests/test_wheel.py

test-versions: $(VENV)/.stamp-dev
	$(BIN)/python -m tools.versions

mutants: $(VENV)/.stamp-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutants --count $(MUTANTS)

test-accelerator:
	$(PYTHON) -m pytest -m accelerator $$(grep -rl --include='*.py' mark.accelerator tests)  # alone: such machines may lack what other tests import

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(VENV)/.stamp-dev
	$(BIN)/python -m benchmarks

figures: $(VENV)/.stamp-dev
	$(BIN)/python -m tools.figures

docs: $(VENV)/.stamp-docs
	$(BIN)/python -m tools.docs

dist: $(VENV)/.stamp-dev
	$(BIN)/python -m tools.dist

release: $(VENV)/.stamp-dev
	$(BIN)/python -m tools.release

$(VENV)/.stamp-run: requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile -r requirements.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run requirements-dev.txt
	$(PIP) install --no-compile -r requirements-dev.txt
	$(PIP) install --no-deps quantus==0.6.0  # without its opencv-python: the headless one is there
	touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-dev requirements-docs.txt
	$(PIP) install --no-compile -r requirements-docs.txt
	touch $@

# Debian's browser, where there is none and it may be installed; else the tests that need one are skipped.
$(VENV)/.stamp-browser: $(VENV)/.stamp-dev
	command -v chromium || command -v chromium-browser || command -v google-chrome \
	  || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	  || echo "no Chromium here, and it could not be installed: tests in a browser are skipped"
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest .venv-highest .mypy_cache .ruff_cache .hypothesis build dist demo
