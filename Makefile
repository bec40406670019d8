# Every target that needs Python sets up .venv first; the stamp makes that free when nothing changed.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.thinwire-installed
CXX_FILES := $(shell find csrc -name '*.[ch]pp')
TORCH_VERSION := 2.13.0

# The interpreter for .venv: the first of these that PyTorch supports and that can create an environment.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	  $$p -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && \
	  { echo $$p; break; }; done)

# An extra package index for PyTorch, for example https://download.pytorch.org/whl/cpu for the small CPU-only build.
TORCH_INDEX ?=

# How long `make asan` fuzzes. (bash has a variable of that name; only the command line's counts.)
ifneq ($(origin SECONDS),command line)
SECONDS := 20
endif

# The release of Python on the machine that `make gpu-lease` packs for.
PYTHON_THERE ?= 3.12

# How long `make chaos` and `make soak` take.
MINUTES ?= 30
HOURS ?= 8

.DEFAULT_GOAL := help
.PHONY: help install train check test test-all test-torch lint format asan lock audit docs structure wheels picture site check-launchers check-workflows test-frameworks bench-peers gpu-check gpu-lease chaos soak clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## create .venv with pinned packages and the thinwire command

# Without build isolation the pins reach the build's own requirements too, and only changed C++ is compiled again.
$(STAMP): pyproject.toml bench/pyproject.toml constraints.txt CMakeLists.txt csrc/CMakeLists.txt $(CXX_FILES)
	@command -v g++ clang++ $(CXX) >/dev/null || { echo "thinwire compiles its codecs: apt-get install g++" >&2; exit 1; }
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "thinwire needs Python 3.11 to 3.14 with its venv module:" \
	  "apt-get install python3 python3-venv, or name an interpreter: make install PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION) scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --no-build-isolation --config-settings=build-dir=build/editable \
	  --config-settings=cmake.define.THINWIRE_WERROR=ON --editable '.[dev,docs]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable bench
	@touch $@

train: install ## train a small Llama on this machine (4 ranks as 2x2 without a GPU)
	$(BIN)/thinwire train recipes/quickstart.toml

# What a change most often breaks, in minutes: decisions, specifications, codecs, and a little of everything on ranks.
SKIPPED := tests/behaviours tests/end_to_end tests/families tests/integrations tests/lab tests/checkpoint/test_store.py \
  tests/checkpoint/test_store_local.py tests/codecs/cpp tests/codecs/triton tests/codecs/test_backends.py \
  tests/collectives/links/test_rendezvous.py tests/profile/test_measure.py tests/tools/test_lease.py \
  tests/train/test_trainer.py

check: lint ## lint, then what a change most often breaks, in a few minutes
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu and (smoke or not ranks)" \
	  $(addprefix --ignore=,$(SKIPPED)) tests

test: lint ## lint, then every test that is not marked slow
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-all: lint ## lint, then all tests, slow ones included, and each wait taken out in turn
	$(BIN)/python -m pytest -n 2 -m "not gpu"
	$(BIN)/python tools/plant.py

# Other releases of PyTorch get an environment of their own, without the pins that go with TORCH_VERSION.
OTHER := .venv-torch-$(TORCH)
test-torch: install ## every test that is not slow with another PyTorch, for example TORCH=2.11.0, the oldest
	@test -n "$(TORCH)" || { echo "name a release: make test-torch TORCH=2.11.0" >&2; exit 1; }
	@test -x $(OTHER)/bin/python || $(BIN)/python -m venv $(OTHER)
	grep -viE '^(torch|triton|sympy|networkx|filelock|fsspec|setuptools)' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OTHER)/constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$(TORCH) scikit-build-core nanobind cmake ninja
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OTHER)/constraints.txt \
	  --no-build-isolation --config-settings=build-dir=build/torch-$(TORCH) --editable '.[dev]'
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable bench
	PATH="$(abspath $(OTHER))/bin:$$PATH" $(OTHER)/bin/python -m pytest -n 2 -m "not slow and not gpu" \
	  --ignore tests/architecture --ignore tests/documentation/test_commands.py

# The newest releases are pinned in constraints.txt; these are the minor releases before them. torchtitan is in no other
# environment, as it pins a release of datasets that others do not take.
FRAMEWORKS ?= transformers==5.22.2 accelerate==1.14.0 lightning==2.5.6 torchtitan==0.3.0
test-frameworks: install ## tests/integrations with older releases, for example FRAMEWORKS=transformers==5.22.2 SLOW=1
	$(BIN)/python tools/frameworks.py $(if $(SLOW),--slow) $(FRAMEWORKS)

lint: install ## ruff, mypy, import contracts, clang-format
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config tools/rooms.toml

format: install ## format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

asan: install ## fuzz the native codecs under the address and undefined behaviour sanitizers; SECONDS=20
	$(BIN)/cmake -S . -B build/asan-$(notdir $(CXX)) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCMAKE_CXX_COMPILER=$(CXX) -DTHINWIRE_PYTHON=OFF -DTHINWIRE_FUZZ=ON \
	  -DTHINWIRE_SANITIZE=address,undefined,float-cast-overflow --log-level=WARNING
	$(BIN)/cmake --build build/asan-$(notdir $(CXX))
	@fuzz=build/asan-$(notdir $(CXX))/csrc/thinwire_fuzz; if [[ "$(notdir $(CXX))" == clang* ]]; then \
	  $$fuzz -max_total_time=$(SECONDS) -max_len=4096; else $$fuzz $(SECONDS); fi

# uv resolves for every Python that thinwire supports, and knows the hashes of every file of a release. torch's CUDA
# build takes one release of Triton only.
lock: install ## write locked.txt: constraints.txt with hashes
	@test -x build/lock/bin/uv || { $(BIN)/python -m venv build/lock && \
	  build/lock/bin/python -m pip install --quiet --disable-pip-version-check uv; }
	grep -v '^triton==' constraints.txt > build/lock/constraints.txt
	printf 'scikit-build-core\nnanobind\ncmake\nninja\n' > build/lock/build.in
	{ echo '# constraints.txt with the hashes of every file, for pip install --require-hashes; `make lock` writes it.'; \
	  build/lock/bin/uv pip compile pyproject.toml build/lock/build.in --extra dev --extra docs --quiet \
	  --constraint build/lock/constraints.txt --universal --python-version 3.11.7 --generate-hashes --no-header \
	  --no-annotate --unsafe-package thinwire; } > build/lock/locked.txt
	mv build/lock/locked.txt locked.txt

audit: install ## look up the pinned packages in a copy of the OSV database: make audit OSV=all.zip
	@test -n "$(OSV)" || { echo "name a copy of OSV's database of PyPI: make audit OSV=all.zip" >&2; exit 1; }
	$(BIN)/python tools/audit.py "$(OSV)" constraints.txt locked.txt

docs: install structure ## regenerate the pages docs/*-reference.md from the types, and the drawn structure
	$(BIN)/python tools/reference.py docs

structure: install ## count what a reader feels, and draw the packages in docs/architecture.md and docs/structure.svg
	$(BIN)/python tools/structure.py --page docs/architecture.md --svg docs/structure.svg

wheels: install ## build one sdist and manylinux wheels into dist, and try each wheel in an empty environment
	$(BIN)/python tools/wheels.py dist

picture: install ## draw the picture of the README from docs/results
	$(BIN)/python tools/headline.py docs/speed.svg

site: install ## build the documentation into build/site, warnings as errors
	$(BIN)/python -m sphinx --jobs auto --quiet --fail-on-warning --keep-going docs build/site

check-launchers: install ## validate and run examples/launchers with Kubeflow's API, SkyPilot and Ray
	$(BIN)/python -m venv build/launchers
	build/launchers/bin/python -m pip install --quiet --disable-pip-version-check "kubeflow-trainer-api==2.3.0" "ray[train]>=2.60" "skypilot>=0.14" pyyaml
	THINWIRE_LAUNCHERS=$(abspath build/launchers/bin/python) $(BIN)/python -m pytest -m "slow or not slow" tests/documentation/test_launchers.py

check-workflows: install ## check .github/workflows with GitHub's schema and zizmor, in an environment of their own
	$(BIN)/python -m venv build/workflows
	build/workflows/bin/python -m pip install --quiet --disable-pip-version-check check-jsonschema zizmor
	build/workflows/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	build/workflows/bin/zizmor --offline --no-progress .github/workflows

bench-peers: install ## install what `thinwire bench` can compare with: DeepSpeed, torchft, codecs of others
	@command -v g++ >/dev/null || { echo "DeepSpeed compiles a module with g++: apt-get install g++" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools ninja
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --no-build-isolation deepspeed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  bitsandbytes torchao torchft zfpy zipnn
	PATH="$(abspath $(BIN)):$$PATH" DS_ACCELERATOR=cpu $(BIN)/python -c \
	  'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as module; module().load()'

gpu-check: install ## prove the GPU path on this machine's cards, part by part, and write docs/gpu.md
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN)/python -m benchmarks.gpu run --results docs/results/gpu; status=$$?; \
	  $(BIN)/python -m benchmarks.gpu render docs/results/gpu --page docs/gpu.md && exit $$status; \
	else echo "gpu-check: skipped, PyTorch finds no CUDA device on this machine; rehearse it on CPU with" \
	  "'$(BIN)/python -m benchmarks.gpu run --device cpu --results runs/gpu-rehearsal'"; fi

gpu-lease: install ## pack the GPU check for a lent machine without network, PYTHON_THERE=3.12, into build/lease
	$(BIN)/python tools/lease.py build/lease --python $(PYTHON_THERE)

chaos: install ## disturb small runs for MINUTES=30 and compare them; as root also full disks, losses of power and cut links
	$(BIN)/thinwire bench chaos --minutes $(MINUTES)

soak: install ## train for HOURS=8, and say whether memory, descriptors, threads or step times grow
	$(BIN)/thinwire bench soak --hours $(HOURS)

clean: ## remove caches and build output; keeps .venv and runs
	rm -rf build dist docs/generated .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src bench tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
