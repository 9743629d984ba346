# Every target sets up .venv first if need be. TORCH= chooses another torch, ARGS= adds arguments.
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help setup demo test test-unit prove prove-gpu prove-gpus mutate check lint types imports proto stubs docs images \
	release

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 13

setup: ## .venv with all that development needs; a second call does nothing
	@tools/setup.sh

demo: setup ## a small cluster on this machine, a few streamed prompts, a summary
	@baton demo $(ARGS)

test-unit: setup ## the tests that start no process and open no port
	pytest -n 2 $$(python -m tests.support.unit_tier) $(ARGS)

test: setup ## the tests that fit any machine, in minutes
	pytest -n 4 --durations=10 -v $(ARGS)

prove: setup ## the proofs at full size (marker slow) that need no GPU
	pytest --durations=10 -v -m 'slow and not gpu and not multigpu' $(ARGS)

prove-gpu: setup ## all that needs one GPU, at full size
	pytest --durations=10 -v -s -m 'gpu or (any_device and not slow)' $(ARGS)

prove-gpus: setup ## all that needs several GPUs of one host
	CUDA_MODULE_LOADING=EAGER pytest --durations=10 -v -s -m multigpu $(ARGS)

mutate: setup ## mutants of what safety rests on, and which of them no test notices; hours on two cores
	pip install -q --disable-pip-version-check -c constraints.txt -e '.[mutation]'
	mutmut run --max-children $$(nproc)
	mutmut results

check: setup ## style, types, import contracts, wire, generated code
	@$(MAKE) --jobs --output-sync=target --no-print-directory lint types imports proto
	@echo "check: all is well"

lint: setup
	ruff check
	ruff format --check

types: setup
	mypy

imports: setup
	lint-imports

proto: setup
	buf lint
	tools/check_stubs.sh

stubs: setup ## regenerate baton/v1 from proto/, and the types of request fields from their table
	tools/generate_stubs.sh
	PYTHONPATH=. python tools/request_types.py

docs: setup ## regenerate the tables of docs/metrics.md, docs/fields.md and docs/configuration.md
	PYTHONPATH=. python tools/metrics_page.py
	PYTHONPATH=. python tools/fields_page.py
	PYTHONPATH=. python tools/settings_page.py

images: setup ## images of router and worker in dist/, or pushed (ARGS='--push REGISTRY'); needs docker with buildx
	@python -m deploy.release.images $(ARGS)

release: setup ## VERSION=x.y.z: sets this version, builds wheel, sdist, chart and images into dist/
	@pip install -q --disable-pip-version-check -c constraints.txt -e '.[release]'
	@python -m deploy.release $(VERSION) $(ARGS)
