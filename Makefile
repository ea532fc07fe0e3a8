# The two commands of the README, and what developers repeat. Each does its own set-up.
#   make demo DEMO_ARGS="--preset small"    make test TEST_ARGS="-k forward"    make demo TORCH=torch==2.11.0
SHELL := /bin/bash
PYTHON ?= $(shell python3 build_tools/choose_python.py)
TORCH ?= torch
DEMO_ARGS ?=
TEST_ARGS ?=

.PHONY: demo test kernels resource-report lint format environment install-demo install-test lint-tools clean

demo: install-demo
	"$(PYTHON)" examples/train_gpt.py $(DEMO_ARGS)

test: install-test
	"$(PYTHON)" -m pytest $(TEST_ARGS)

kernels: environment
	"$(PYTHON)" -m build_tools.build_kernels

resource-report:
	"$(PYTHON)" -m build_tools.resource_report

lint: lint-tools
	"$(PYTHON)" -m build_tools.lint

format: lint-tools
	"$(PYTHON)" -m build_tools.lint --fix

environment:
	build_tools/set_up.sh "$(PYTHON)" '$(TORCH)'

# Builds first, in sight: pip hides what a build prints. It then finds everything up to date.
install-demo install-test: install-%: environment
	"$(PYTHON)" -m build_tools.build_extension
	"$(PYTHON)" -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[$*]'

lint-tools: environment
	"$(PYTHON)" -m pip install --quiet --disable-pip-version-check -r build_tools/lint_requirements.txt

clean:
	rm -rf build flash_attn_cuda/_C.*.so flash_attn_cuda/_install.json *.egg-info
