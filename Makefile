# Everything a newcomer, a developer and CI run. `make` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Installed before everything else, so that nothing later picks another build. What pip takes by
# default on Linux is the CUDA build, which a machine with a recent NVIDIA GPU wants. PyTorch keeps
# an index of wheels for each other device (CPU only, other CUDA versions, ROCm); name it here:
#   make setup TORCH="torch==2.13.0 --index-url <PyTorch's index for your device>"
TORCH ?= torch==2.13.0

# Written when set-up is complete; older than pyproject.toml means do it again.
STAMP := $(VENV)/.setup-done

.DEFAULT_GOAL := help
.PHONY: help setup run up down test check lint types protos bench secrets check-gpu

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with dspark, its engine and the development tools

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade "pip>=25.1"  # --group is new in 25.1
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e ".[serve,cluster,telemetry,bench]" --group dev
	touch $@

run: setup ## Serve the default model on http://127.0.0.1:8000 (OpenAI) and gRPC 50051
	$(BIN)/dspark serve

up: setup ## A whole cluster of the default model here: separate pools, same addresses as run
	$(BIN)/dspark up

down: ## End the cluster that `make up` started
	$(BIN)/dspark down

test: setup ## Run the tests (without the slow and GPU ones)
	$(BIN)/python -m pytest

check: lint types test ## Format, lint, strict types, tests: what has to pass

lint: setup ## Formatting and lint rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup ## Strict types
	$(BIN)/mypy

protos: setup ## Write the generated code beside protos/dspark/v1/*.proto
	$(BIN)/python protos/generate.py

bench: setup ## Time what benchmarks/ measures
	$(BIN)/python -m pytest benchmarks/bench_*.py --benchmark-only

secrets: ## Make what docker-compose.yml needs and nobody may see (docs/deploy.md)
	@sh infra/compose/make-secrets

check-gpu: setup ## Run the tests that need a CUDA device, ten minutes at most
	timeout 600 $(BIN)/python -m pytest -m gpu
