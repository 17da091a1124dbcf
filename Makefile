# Everything runs in .venv at the project's root, which `make setup` makes and keeps current.
PY := .venv/bin/python
CXX_FILES = $(shell git ls-files 'native/*.cpp' 'native/*.h')

.PHONY: setup test lint demo bench protos

setup:
	@tools/setup.sh

test: setup
	$(PY) -m pytest

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(if $(CXX_FILES),.venv/bin/clang-format --dry-run -Werror $(CXX_FILES))
	.venv/bin/lint-imports
	$(PY) tools/generate_protos.py --check

demo: setup
	$(PY) -m demo

# One benchmark a file (benchmarks/ also has what they share); each prints its limit beside the figure.
bench: setup
	@for file in $$(grep -l __main__ benchmarks/*.py); do \
	  name=$$(basename "$$file" .py); echo "== $$name"; $(PY) -m "benchmarks.$$name" || exit 1; \
	done

protos: setup
	$(PY) tools/generate_protos.py
