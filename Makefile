# Everything starts from the files alone: the first target that needs the environment makes it.
#
#   make demo     one slow script diagnosed and tuned, beside its fast twin
#   make test     the test suite
#   make fast     its fast part, without what is marked slow
#   make long     the tests that are too long for make test
#   make pythons  the fast tests with each other Python that is installed, in environments of their own
#   make check    style, types, arrows, doctests, documentation
#   make format   mend what style finds, where a tool can
#   make bench    the benchmarks behind the claims
#   make world    the environment of bench/world, which runs check on other people's scripts
#   make package  build and check the wheel, install it into an empty environment, type commands there, list what it brings
#   make run-docs run the code and the commands of all pages, and compare what they print
#   make docs     write the generated pages and build the site into site/
#   make clean    remove caches and the built site; the environment stays (rm -r .venv for that)

PYTHON ?= python3
JOBS   ?= 2
SLOW   ?= examples/slow/char_gpt.py
FAST   ?= examples/fast/char_gpt.py

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# Tests start hundreds of processes: they compile flatout's modules once, also where the environment says not to keep that.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test long fast pythons check style types arrows doctests pages run-docs format bench world package docs clean

help:
	@sed -n 's/^#   make/make/p' Makefile

# Two stamps: the demo needs flatout and its examples only; tests and checks need the tools as well. The constraints pin
# torch, so that both get the same one.
$(VENV)/examples.stamp: pyproject.toml constraints.txt
	@echo "== environment: flatout and its examples, into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[examples]'
	@touch $@

$(VENV)/tools.stamp: $(VENV)/examples.stamp
	@echo "== environment: tools for tests, checks and documentation"
	@$(PIP) -e '.[test,dev,docs]'
	@touch $@

demo: $(VENV)/examples.stamp
	@echo "== this machine"
	@$(BIN)/flatout machine
	@echo; echo "== slow: $(SLOW)"
	@$(BIN)/flatout check $(SLOW)
	@echo; echo "== its fast twin: $(FAST)"
	@$(BIN)/flatout check $(FAST)
	@echo; echo "== tuned without touching it: $(SLOW)"
	@mkdir -p build
	@$(BIN)/flatout tune --time-budget 60s --out build/demo-plan.toml $(SLOW)
	@echo; echo "== proved once more, from nothing"
	-@$(BIN)/flatout verify --seconds 6 build/demo-plan.toml $(SLOW)

# Tests race real processes and end them at any moment, on cores that others use, too. One that fails runs again, alone; its first
# failure stays in the output, and one that fails alone fails.
tests = $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m '$(1)' $(2) || { test $$? = 1 && \
	  echo "== failed beside others; once more, alone" && \
	  $(BIN)/python -m pytest -q -m '$(1)' --last-failed --last-failed-no-failures none; }

test: $(VENV)/tools.stamp
	@$(call tests,not long,--durations=40 --durations-min=3)

long: $(VENV)/tools.stamp
	@$(call tests,long)

fast: $(VENV)/tools.stamp
	@$(call tests,not slow and not long)

PYTHONS ?= python3.12 python3.13 python3.14
pythons: pyproject.toml constraints.txt
	@for python in $(PYTHONS); do \
	  command -v $$python >/dev/null || { echo "== $$python is not installed"; continue; }; \
	  echo "== the fast tests with $$python"; \
	  test -x build/$$(basename $$python)/bin/python || $$python -m venv build/$$(basename $$python) || exit 1; \
	  build/$$(basename $$python)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]' || exit 1; \
	  build/$$(basename $$python)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m 'not slow and not long' -p no:cacheprovider || exit 1; \
	done

# One target a check, so that 'make -k check' shows everything that is wrong, and 'make types' one thing.
check: style types arrows doctests pages

style: $(VENV)/tools.stamp
	@echo "== style"
	@$(BIN)/ruff format --quiet --check --output-format concise .
	@$(BIN)/ruff check --quiet --output-format concise .

types: $(VENV)/tools.stamp
	@echo "== types"
	@$(BIN)/mypy --no-error-summary

arrows: $(VENV)/tools.stamp
	@echo "== arrows"
	@$(BIN)/lint-imports --no-logo

doctests: $(VENV)/tools.stamp
	@echo "== doctests"
	@$(BIN)/python -m pytest -q --doctest-modules src docs/generate_rules.py

pages: $(VENV)/tools.stamp
	@echo "== documentation"
	@$(BIN)/python docs/generate_rules.py --check
	@$(BIN)/python docs/generate_levers.py --check
	@$(BIN)/python docs/generate_reductions.py --check
	@$(BIN)/python docs/generate_schema.py --check
	@$(BIN)/python docs/generate_reference.py --check
	@$(BIN)/python docs/generate_world.py --check
	@$(BIN)/python docs/generate_results.py --check
	@$(BIN)/python docs/generate_benchmarks.py --check
	@$(BIN)/python docs/generate_planner.py --check
	@$(BIN)/python docs/generate_best.py --check
	@$(BIN)/python docs/generate_architecture.py --check
	@mkdir -p build
	@$(BIN)/zensical build --config-file mkdocs.yml --strict >build/site.log 2>&1 || { cat build/site.log; exit 1; }

run-docs: $(VENV)/tools.stamp
	@$(BIN)/python docs/run_pages.py --jobs $(JOBS)

format: $(VENV)/tools.stamp
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix --output-format concise .

bench: $(VENV)/tools.stamp
	@ls bench/*.py >/dev/null 2>&1 || { echo "bench/ holds no script yet"; exit 1; }
	@for script in bench/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

world: $(VENV)/examples.stamp
	@echo "== environment: what other people's scripts import, into build/world/venv"
	@test -x build/world/venv/bin/python || $(BIN)/python -m venv build/world/venv
	@build/world/venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[edit]' -r bench/world/requirements.txt
	@# It asks for an older huggingface_hub than transformers does, and works with either.
	@build/world/venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps huggingface_sb3==3.0

# What a user gets from an index: built from the files that git knows, checked, installed beside torch into an environment with
# nothing else in it, and typed at. The list of all that comes along (SBOM, CycloneDX) is of that environment.
PACKAGE := build/package
package: pyproject.toml constraints.txt
	@echo "== the tools, into $(PACKAGE)/tools"
	@test -x $(PACKAGE)/tools/bin/python || $(PYTHON) -m venv $(PACKAGE)/tools
	@$(PACKAGE)/tools/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt build check-wheel-contents cyclonedx-bom twine
	@echo "== wheel and sdist, into dist"
	@rm -rf dist $(PACKAGE)/installed
	@$(PACKAGE)/tools/bin/python -m build --outdir dist . >$(PACKAGE)/build.log 2>&1 || { cat $(PACKAGE)/build.log; exit 1; }
	@$(PACKAGE)/tools/bin/twine check --strict dist/*
	@$(PACKAGE)/tools/bin/check-wheel-contents dist/*.whl
	@echo "== installed into an empty environment"
	@$(PYTHON) -m venv $(PACKAGE)/installed
	@$(PACKAGE)/installed/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt "$$(ls $$PWD/dist/*.whl)[edit,html]"
	@$(PACKAGE)/tools/bin/cyclonedx-py environment --output-reproducible --of JSON -o dist/flatout.cdx.json $(PACKAGE)/installed/bin/python
	@$(PACKAGE)/installed/bin/flatout --version
	@$(PYTHON) tests/typed_commands.py --flatout $(PACKAGE)/installed/bin/flatout

docs: $(VENV)/tools.stamp
	@$(BIN)/python docs/generate_rules.py
	@$(BIN)/python docs/generate_levers.py
	@$(BIN)/python docs/generate_reductions.py
	@$(BIN)/python docs/generate_schema.py
	@$(BIN)/python docs/generate_reference.py
	@$(BIN)/python docs/generate_world.py
	@$(BIN)/python docs/generate_results.py
	@$(BIN)/python docs/generate_benchmarks.py
	@$(BIN)/python docs/generate_planner.py
	@$(BIN)/python docs/generate_best.py
	@$(BIN)/python docs/generate_architecture.py
	@mkdir -p build
	@$(BIN)/zensical build --config-file mkdocs.yml --strict >build/site.log 2>&1 || { cat build/site.log; exit 1; }
	@echo "the site is in site/index.html"

clean:
	@rm -rf site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests examples bench docs -name __pycache__ -type d -prune -exec rm -rf {} +
