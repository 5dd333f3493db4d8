# `make test` and `make demo` work in a fresh checkout: they first make `.venv`, with everything in it.
# Where BYTESPLAT_ENV_CACHE names a folder, the dependencies are kept there and shared between checkouts.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: test lint demo kernels cuda environment

test: lint kernels cuda
	@$(BIN)/python -m pytest

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

demo: kernels
	$(BIN)/python -m bytesplat_ns.demo

# The CPU libraries again, when their sources have changed since they were installed.
kernels: environment
	@$(BIN)/python -m bytesplat_ns.ops.cpu_build

# Compiles every CUDA kernel for every kind of GPU (needs none); fails on an error or a register spill.
cuda: environment
	@$(BIN)/python -m bytesplat_ns.ops.compile_check

environment:
	@$(PYTHON) .ci/environment.py
