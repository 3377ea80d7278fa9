# make demo, make test: each makes the environment in .venv first, with the versions of constraints.txt.

PYTHON ?= python3
PYTEST_ARGS ?= -n 2
ROUNDS ?= 500
BIN := .venv/bin
READY := .venv/.ready
CPP := templates/ptx/*.cuh templates/emulate/*.hpp tests/emulator/*.cu
DEMO := --head-dim 128 --softcap --no-dropout

.PHONY: help env demo test soak lint format hooks bench-compile wheel clean
.DELETE_ON_ERROR:

help:
	@echo "make demo           build one kernel, run it (on the GPU, else emulated) and compare it with float64"
	@echo "make test           run all tests; PYTEST_ARGS='-k render' for some"
	@echo "make soak           build while things go wrong, and count what must not happen; ROUNDS=500"
	@echo "make lint           ruff, mypy, clang-format"
	@echo "make format         let ruff and clang-format rewrite what they would"
	@echo "make hooks          run make lint before every commit"
	@echo "make bench-compile  time builds, cold and warm"
	@echo "make wheel          the wheel and the source archive, in dist/"
	@echo "make clean          remove built kernels, archives and caches; .venv stays"

env: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fagen needs Python 3.10 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[cuda,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/fagen build $(DEMO)
	$(BIN)/fagen check $(DEMO)

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

soak: $(READY)
	$(BIN)/python -m tests.soak --rounds $(ROUNDS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

hooks: $(READY)
	$(BIN)/pre-commit install

bench-compile: $(READY)
	$(BIN)/fagen bench --compile

wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean:
	find generated -mindepth 1 ! -name README.md -delete
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
