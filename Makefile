# The two commands of the README, and what developers repeat. Each does its own set-up.
#   make demo DEMO_ARGS="--preset small"    make test TEST_ARGS="-k forward"    make demo TORCH=torch==2.11.0
SHELL := /bin/bash
PYTHON ?= $(shell python3 build_tools/install.py choose)
TORCH ?= torch
DEMO_ARGS ?=
TEST_ARGS ?=
# Processes that share the tests, and the cores.
CORES := $(shell nproc)
TEST_WORKERS ?= $(shell echo $$(( $(CORES) < 4 ? $(CORES) : 4 )))
GPU_TEST_WORKERS ?= 4

.PHONY: demo test gpu-test sanitize kernels resource-report wheel wheels hub release lint format environment install-demo install-test lint-tools release-tools clean

demo: install-demo
	"$(PYTHON)" examples/train_gpt.py $(DEMO_ARGS)

test: install-test
	OMP_NUM_THREADS=$$(( $(CORES) / $(TEST_WORKERS) )) "$(PYTHON)" -m pytest --quiet --numprocesses $(TEST_WORKERS) --dist loadgroup $(TEST_ARGS)

# On a GPU: the summary in tests/gpu_results. The workers share the cores, of which torch would give all to each. More
# than four of them hold each other up on a GPU. Few tests are given out at once, as slow ones stand side by side.
gpu-test: install-test
	OMP_NUM_THREADS=2 "$(PYTHON)" -m pytest -m gpu --numprocesses $(GPU_TEST_WORKERS) --dist worksteal --gpu-summary tests/gpu_results $(TEST_ARGS)

sanitize: install-test
	"$(PYTHON)" -m tests.sanitizer.sanitize_all --summary tests/gpu_results

kernels: environment
	"$(PYTHON)" -m build_tools.build_kernels

resource-report:
	"$(PYTHON)" -m build_tools.report.resource_report

# Of this tree and not, as build does by itself, of the unpacked sdist, which would compile all kernels again. What an
# earlier build left to be packed may have files that are no longer in the package.
wheel: environment
	"$(PYTHON)" -m pip install --quiet --disable-pip-version-check 'build>=1.2'
	"$(PYTHON)" -m build_tools.build_extension
	rm -rf build/lib build/lib.* build/bdist.*
	"$(PYTHON)" -m build --no-isolation --sdist --wheel

# For other machines: build_tools/release/ says what they leave in dist/.
wheels hub release: release-tools
	"$(PYTHON)" -m build_tools.release $@

lint: lint-tools
	"$(PYTHON)" -m build_tools.lint

format: lint-tools
	"$(PYTHON)" -m build_tools.lint --fix

environment:
	python3 build_tools/install.py environment "$(PYTHON)" '$(TORCH)'

# For this machine alone: build_tools/install.py says what that is.
install-demo install-test: install-%: environment
	"$(PYTHON)" -m build_tools.install $*

lint-tools: environment
	"$(PYTHON)" -m pip install --quiet --disable-pip-version-check -r build_tools/lint_requirements.txt

release-tools: environment
	"$(PYTHON)" -m pip install --quiet --disable-pip-version-check -r build_tools/release/requirements.txt

clean:
	rm -rf build flash_attn_cuda/_C.*.so flash_attn_cuda/_install.json *.egg-info
