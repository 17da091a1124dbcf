# Everything runs in .venv at the project's root, which `make setup` makes and keeps current.
PY := .venv/bin/python
CXX_FILES = $(shell git ls-files 'native/*.cpp' 'native/*.h' 'native/*.cu')

.PHONY: setup test test-vllm lint demo bench protos

setup:
	@tools/setup.sh

test: setup
	$(PY) -m pytest

# Another CPU build of vLLM, in an environment of its own: make test-vllm VERSION=0.31.0 [ARGS="tests/vllm/test_engine.py"]
# runs the connector's unit tests, then real engines.
ARGS ?= $(wildcard tests/unit/test_connector_*.py) tests/unit/test_identity.py tests/vllm
test-vllm:
	@[ -n "$(VERSION)" ] || { echo "which one? make test-vllm VERSION=0.31.0"; exit 2; }
	@tools/setup.sh $(VERSION)
	.venv-vllm-$(VERSION)/bin/python -m pytest $(ARGS)

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
