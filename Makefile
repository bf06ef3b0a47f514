# `make` lists the targets. ARGS passes arguments: make test ARGS='-k collectives'
PY := .venv/bin/python
ARGS ?=
COVERAGE := COVERAGE_FILE=$(CURDIR)/build/coverage/data COVERAGE_RCFILE=$(CURDIR)/pyproject.toml
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-devices test check test-all one cover test-slow test-cuda test-gpu test-keras test-kerases test-keras-examples test-libraries test-theano test-nvrtc test-nccl test-cublas test-driver test-cudnn test-slurm test-pythons test-packages test-docker test-scripts bench clean

help: ## list the targets
	@echo 'make demo and make test install their requirements: no other command has to run first.'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-26s %s\n' "$$name" "$$text"; done

setup: ## install missing packages: of Debian (as root or with sudo), then in .venv
	@.ci/setup

demo: ## run a script of plain Theano as it is, and on all devices: times, and whether the answer is the same
	@.ci/setup demo
	@$(PY) .ci/demo $(ARGS)

demo-devices: setup ## train a small CNN over two devices, without a GPU over OpenCL, and over one, and compare
	@$(PY) examples/theano_cnn.py --opencl-cpus $(ARGS)

test: setup ## lint, then the tests and doctests, with mypy among them
	@$(PY) -m ruff check .
	@$(PY) .ci/quickly $(PY) -m pytest -n 3 -m 'not slow' $(ARGS)
	$(if $(ARGS),@echo 'ARGS is set: the part on the CUDA stand-in is left out (make test-cuda runs it)',@$(PY) .ci/quickly .ci/test-cuda core)

check: setup ## ruff, mypy, and tests of the documents, of packages, of benchmarks and of the layout: a part of make test
	@$(PY) -m ruff check .
	@$(PY) .ci/quickly $(PY) -m pytest -n 2 -m 'not slow' tests/project $(ARGS)

test-all: setup ## every suite, one after the other, for a night; writes the table of docs/tests.md; ARGS=--help
	@$(PY) .ci/test-all $(ARGS)

one: setup ## one test, or one file: make one T=tests/plan/test_plan.py::test_where_new_values_are_made
	@$(PY) .ci/quickly $(PY) -m pytest -q -n 0 $(or $(T),$(error T=tests/file.py::test is missing)) $(ARGS)

cover: setup ## the tests of make test, and which branches of the package they run: build/coverage/index.html
	@rm -rf build/coverage; mkdir -p build/coverage
	-@$(COVERAGE) COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml \
	    $(PY) .ci/quickly $(PY) -m pytest -n 2 -m 'not slow' $(ARGS)
	@$(COVERAGE) $(PY) -m coverage combine -q
	@$(COVERAGE) $(PY) -m coverage report --skip-covered
	@$(COVERAGE) $(PY) -m coverage html -q -d build/coverage

test-slow: setup ## the long tests, which make test leaves out: more models, more OpenCL contexts, optimised kernels
	@TEST_CXXFLAGS=-O1 POCL_EXTRA_BUILD_FLAGS= $(PY) .ci/quickly $(PY) -m pytest -n 2 -m slow $(ARGS)

test-cuda: setup ## the tests on a CUDA stand-in that runs on the CPU; DEVICES=4 for four devices
	@$(PY) .ci/quickly .ci/test-cuda $(ARGS)

test-keras: setup ## Keras's own tests, plain and over contexts: FOLDER=/a/checkout/of/keras, tag 2.3.1; ARGS=--help
	@$(PY) .ci/quickly $(PY) .ci/test-upstream keras $(FOLDER) $(ARGS)

test-kerases: setup ## the own tests of several Kerases, 1.2.2 to 2.3.1, plain and divided (downloads them); ARGS=--help
	@$(PY) .ci/quickly $(PY) .ci/test-kerases $(ARGS)

test-keras-examples: setup ## the examples of several Kerases, plain and divided, with small data sets (downloads them); ARGS=--help
	@$(PY) .ci/quickly $(PY) .ci/test-keras-examples $(ARGS)

test-libraries: setup ## small programs of Lasagne, nolearn, Blocks, PyMC3 and others, plain and divided (downloads them); ARGS=--help
	@$(PY) .ci/quickly $(PY) .ci/test-libraries $(ARGS)

test-theano: setup ## Theano's own tests, plain and with every function divided; ARGS=--help
	@$(PY) .ci/quickly $(PY) .ci/test-upstream theano $(ARGS)

test-gpu: setup ## on a machine with NVIDIA GPUs: check all that they need, and write build/gpu_report.txt; ARGS=--help
	@$(PY) .ci/test-gpu $(ARGS)

test-nvrtc: setup ## compile every kernel of make test-cuda with NVIDIA's own compiler (downloads it: 200 MB)
	@.ci/test-nvrtc

test-nccl: setup ## compare the calls of NCCL, and its stand-in, with NVIDIA's own library and header (downloads 350 MB)
	@.ci/test-nccl

test-cublas: setup ## compare the calls by which products are TF32 with NVIDIA's own library and headers (downloads 550 MB)
	@.ci/test-cublas

test-driver: setup ## compare the functions of the driver that are called with NVIDIA's own headers (downloads 2 MB)
	@.ci/test-driver

test-cudnn: setup ## compile Theano's ops of cuDNN with NVIDIA's own headers and libraries (downloads them: 2.9 GB)
	@$(PY) .ci/quickly .ci/test-cudnn $(ARGS)

test-slurm: setup ## the tests for Slurm, in a cluster of two nodes on this machine (as root)
	@$(PY) .ci/quickly .ci/test-slurm $(ARGS)

test-pythons: ## install into a plain venv of each CPython 3.8 to 3.13 found here, and smoke-test it
	@.ci/test-pythons

test-packages: setup ## build the sdist and the wheel, and install each outside of the checkout
	@.ci/test-packages

test-docker: ## build docker/*.Dockerfile with buildah, and train in the images (as root)
	@.ci/test-docker

test-scripts: setup ## run the scripts in FOLDER plainly, over contexts and in processes, and compare their output
	@$(PY) .ci/quickly $(PY) .ci/test-scripts '$(or $(FOLDER),$(error FOLDER=/path/to/scripts is missing))' $(ARGS)

bench: setup ## measure the cost of a step over contexts, as in benchmarks/RESULTS.md
	@$(PY) benchmarks/step_overhead.py --models cnn mlp small $(ARGS)

.PHONY: docs
docs: setup ## build the documentation into build/docs; a warning is an error
	@THEANO_FLAGS= $(PY) -m sphinx -q -c docs -b html -d build/doctrees -W --keep-going -n $(ARGS) . build/docs
	@echo 'built: build/docs/index.html'

clean: ## remove build products; .venv stays
	@rm -rf build dist theano_mgpu.egg-info .pytest_cache .ruff_cache
	@find theano_mgpu tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
