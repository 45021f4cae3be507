# Everything runs from a virtual environment in .venv; pip and apt use whatever they are configured for.
#
#   make demo       the whole way on a trained network, from nothing
#   make test       ruff, mypy and the tests that take less than half a minute each
#   make test-slow  the other tests
#   make docs       the documentation as HTML, in build/docs
#   make corpus     every real network: compile, run, verify; ARGS="--only 'tv_*' --jobs 2 --stock-compile"
#   make bench-match    times of matching beside stock TVM's; ARGS="-k ow_ppocrv4_det"
#   make kernel-counts  numbers of kernels beside stock TVM's; ARGS="--networks tv_resnet50"
#   make fuzz       5,000 generated modules through everything, resumable; ARGS="--modules 600 --seed 1"
#   make bench-device             times on an OpenCL device beside stock TVM; ARGS="--networks tv_resnet18"
#   make clean      remove what the other targets made

SHELL  := /bin/bash
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3,$(shell command -v $(name))))
VENV   := .venv
BIN    := $(VENV)/bin
BEGAN  := $(shell date +%s)
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow docs fuzz clean opencl

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.onnx-opencl opencl
	$(BIN)/fusion-patterns demo
	@echo "$$(( $$(date +%s) - $(BEGAN) )) seconds in all, installation included"

test: $(VENV)/.test-onnx-opencl opencl
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

test-slow: $(VENV)/.test-onnx-opencl opencl
	$(BIN)/python -m pytest -m slow

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -q docs build/docs
	@echo "open build/docs/index.html"

# What is done is kept in build/fuzz.jsonl: a run that was interrupted goes on, a finished one is only counted.
fuzz: $(VENV)/.test-onnx-opencl opencl
	$(BIN)/python -m fusion_patterns.testing.fuzz --device "" $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find fusion_patterns tests docs -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
	    { echo "Python 3.11 or 3.12 is needed, '$(PYTHON)' is another one; use: make PYTHON=/path/to/python3.11"; exit 1; }
	@if ! $(PYTHON) -m venv --clear $(VENV); then \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv && \
	        $(PYTHON) -m venv --clear $(VENV); \
	    else echo "this Python can't make virtual environments; on Debian: apt install python3-venv"; exit 1; fi; fi
	@touch $@

# The stamp's name lists the extras: .venv/.test-onnx-opencl is the package with [test,onnx,opencl].
$(VENV)/.%: $(VENV)/.python setup.cfg pyproject.toml
	$(PIP) install --progress-bar off --editable '.[$(subst -,$(comma),$*)]'
	@touch $@

comma := ,

# An OpenCL device on any CPU. A driver that is there already is enough; without one the device tests are skipped.
opencl:
	@if ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1 || [ -n "$$OCL_ICD_VENDORS" ]; then true; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing PoCL, an OpenCL device on the CPU"; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq pocl-opencl-icd >/dev/null; } || \
	        echo "PoCL can't be installed, so nothing runs on an OpenCL device"; \
	else echo "no OpenCL driver here, so nothing runs on an OpenCL device; on Debian: apt install pocl-opencl-icd"; fi

# Measurements; they write into docs. The networks from PyTorch need torch and its model packages.
CORPUS_PACKAGES := torchvision==0.28.0 timm==1.0.31 pytorchcv==0.0.74 segmentation-models-pytorch==0.6.0

$(VENV)/.corpus: $(VENV)/.test-onnx-opencl-torch
	$(PIP) install --progress-bar off --no-deps $(CORPUS_PACKAGES)
	$(PIP) install --progress-bar off huggingface-hub safetensors pillow pyyaml tqdm
	@touch $@

.PHONY: corpus bench-match kernel-counts bench-device

corpus: $(VENV)/.corpus opencl
	$(BIN)/python -m bench.corpus $(ARGS)

bench-match: $(VENV)/.corpus
	mkdir -p build
	$(BIN)/python -m pytest bench/test_match.py --benchmark-columns=min,median,rounds \
	    --benchmark-json build/bench-match.json $(ARGS)
	$(BIN)/python -m bench.match build/bench-match.json

kernel-counts: $(VENV)/.corpus
	$(BIN)/python -m bench.kernel_counts $(ARGS)

PROFILE ?= pocl
PACKS   := build/device

bench-device: $(VENV)/.corpus opencl
	$(BIN)/python -m bench.device prepare $(PACKS) --profile $(PROFILE) $(ARGS)
	$(BIN)/python -m bench.device measure $(PACKS) --json $(PACKS)/results.json
