# SPDX-License-Identifier: Apache-2.0
# make demo · make test · make bench · make lint: each sets up .venv with everything it needs first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
# Without an NVIDIA driver the exact version lets pip take a CPU build where an index offers one.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')

.PHONY: demo test bench lint clean

demo: $(VENV)/.installed
	$(BIN)/fastprompt demo --deepspeed_config ds_configs/zero2.json $(DEMO_ARGS)

test: $(VENV)/.installed
	$(BIN)/pytest -q $(TEST_ARGS)

bench: $(VENV)/.installed
	$(BIN)/python -m bench.kernels $(BENCH_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fastprompt needs Python 3.11 or newer; try make PYTHON=python3.12"; exit 1; }
	@command -v g++ >/dev/null || { echo "DeepSpeed compiles its communication layer: install g++ first"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@case '$(TORCH)' in *==*) echo "No NVIDIA driver: installing $(TORCH); for a small download point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds";; esac
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[all]"
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
