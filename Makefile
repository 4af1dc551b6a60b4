# Every target makes .venv itself when it has to. `make demo` and `make test` work from a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(VENV)/.native
NATIVE_SOURCES := $(wildcard src/precast/weights/native/*.cpp src/precast/weights/native/*.h) \
	src/precast/weights/native/library_file.py src/precast/cli/build.py
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
CLIENTS := .venvs/clients
CLIENTS_STAMP := $(CLIENTS)/.installed
# Tests of what is not part of the package: the site, benchmarks, tools, examples, layout, and what other tests rest on.
# Two files beside them are about the package, and `make test` runs them: public names and the wheel.
PROJECT_TESTS := tests/browser tests/attack/test_runner.py tests/conformance/test_compare.py \
	$(filter-out %/test_package.py %/test_public.py,$(wildcard tests/project/test_*.py))
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start some hundred programs; without bytecode on disk each compiles precast, which takes as long as the rest.
unexport PYTHONDONTWRITEBYTECODE
# pip compiles all that it installs, which takes longer than the rest of it; Python compiles what is imported, once.
INSTALL := pip install --quiet --no-compile --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo examples demo-distributed doctor test test-reference test-project lint format types docs docs-draft docs-serve \
	docs-examples ci bench attack test-clients sanitize wheel test-package test-versions conformance conformance-nightly bench-clients gpu clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml lint/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) --editable '.[dev]' --editable ./lint
	touch $@

# Without a C++ compiler this makes nothing, says so, and is tried again: the reference engine runs.
$(NATIVE): $(STAMP) $(NATIVE_SOURCES)
	$(BIN)/python -m tools.native_library --stamp $@

$(CLIENTS_STAMP): pyproject.toml constraints.txt constraints-clients.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/$(INSTALL) --constraint constraints-clients.txt --editable '.[test-clients]'
	touch $@

demo: $(NATIVE)  ## train a network in float32 and in mixed precision, and show the difference
	$(BIN)/precast demo

demo-distributed: $(NATIVE)  ## two processes on gloo: one has a broken gradient, all skip that step and say whose it was
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/distributed.py
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/distributed.py --ddp

examples: $(NATIVE)  ## run the programs of examples/, one chapter after the other
	@for program in examples/[0-9]*.py; do \
		echo; echo "== $$program"; $(BIN)/python $$program || exit 1; \
	done

doctor: $(NATIVE)  ## what this machine can do in each dtype, measured
	$(BIN)/precast doctor

test: $(NATIVE)  ## the tests of the package, which protect its users; the others are `test-project`
	$(PYTEST) $(addprefix --ignore=,$(PROJECT_TESTS))

test-reference: $(STAMP)  ## what both engines must do alike, on the reference; `test` runs it on the native engine
	PRECAST_ENGINE=reference $(PYTEST) tests/engine tests/weights tests/conformance/test_programs.py \
		--ignore=tests/engine/test_native_library.py

test-project: $(NATIVE)  ## the tests of the site, the examples of the documentation, benchmarks, tools, layout
	$(PYTEST) $(PROJECT_TESTS)

test-clients: $(CLIENTS_STAMP) $(NATIVE)  ## programs of transformers, accelerate, lightning ... with and without precast.install(); the integrations
	$(CLIENTS)/bin/python -m pytest tests/clients --numprocesses auto --dist worksteal \
		--clients-json docs/data/clients.json

SANITIZED := -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZER := ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(for each in asan ubsan stdc++; do printf '%s ' $$(g++ -print-file-name=lib$$each.so); done)"
sanitize: $(STAMP)  ## the engine's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	CXX="env -u LD_PRELOAD g++ $(SANITIZED)" $(SANITIZER) $(BIN)/python -m tools.native_library
	$(SANITIZER) PRECAST_ENGINE=native $(BIN)/python -m pytest tests/engine tests/weights \
		--ignore tests/engine/test_native_library.py; status=$$?; $(BIN)/python -m tools.native_library; exit $$status

wheel: $(STAMP)  ## a wheel with the native engine for every supported PyTorch, in dist; takes their wheels from pip
	$(BIN)/python -m tools.native_library --wheel

test-package: $(STAMP)  ## the wheel and the source distribution in empty environments, and under a user's type checker
	$(BIN)/python -m pytest tests/package

test-versions: $(STAMP)  ## both groups of tests on the oldest and the newest PyTorch that is supported
	$(BIN)/python -m tools.versions

attack: $(NATIVE)  ## every scenario of tests/attack with three fresh seeds; writes the counts to docs/reliability.md
	$(BIN)/python -m tests.attack --seeds 3 --write

conformance: $(NATIVE)  ## all that is compared with PyTorch, and ten thousand random programs; writes docs/conformance.md
	$(BIN)/python -m tools.conformance

conformance-nightly: $(NATIVE)  ## ten thousand random programs of each kind, and all operations on fake tensors of other devices
	$(BIN)/python -m tools.conformance --programs 10000
	PRECAST_WRITE_PROGRAMS=10000 $(PYTEST) tests/weights/test_random_writes.py
	PRECAST_FAKE_DEVICES=all $(PYTEST) tests/conformance/test_fake_devices.py
	PRECAST_PLANTED_FAULTS=200 $(PYTEST) tests/comparison/test_planted.py tests/comparison/test_random_programs.py \
		tests/tuning/test_setting_comparison.py

lint: $(STAMP)  ## format check, lint, the order of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

format: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP)  ## strict type check
	$(BIN)/mypy

docs: $(NATIVE)  ## the documentation site, in build/site; the programs it shows are run
	@mkdir -p build/pages
	$(MKDOCS) build
	$(BIN)/python -m tools.site.check build/site

docs-draft: $(NATIVE)  ## the same while pages are missing: what is wrong is said, and the site is there all the same
	@mkdir -p build/pages
	$(MKDOCS) build --no-strict

docs-serve: $(NATIVE)  ## the site on http://127.0.0.1:8000, built anew when a page changes
	@mkdir -p build/pages
	$(MKDOCS) serve --no-strict

docs-examples: $(NATIVE)  ## run every Python example of the README files and docs
	$(BIN)/python -m pytest tests/project/test_docs.py

# Of the slow files (tests/support/draw.py) a run makes one test of eight, drawn anew each time; `make test` makes all.
# What keeps one core busy runs beside its like; tests take what cores there are. (Make 3.81 cannot keep outputs apart.)
ci: $(NATIVE)  ## everything CI runs (the layer test and the docs examples are part of `test-project`)
	$(MAKE) --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync) \
		lint types docs test-package $(CLIENTS_STAMP)
	PRECAST_DRAW=8 $(MAKE) test test-reference test-project test-clients

bench: $(NATIVE) $(CLIENTS_STAMP)  ## all that has a target, beside torch.autocast, in some twenty minutes; writes docs/figures.md
	$(BIN)/python -m benchmarks --json docs/data/benchmarks.json
	$(BIN)/python -m benchmarks render docs/data/benchmarks.json
	$(BIN)/python -m benchmarks.importing --write
	$(BIN)/python -m benchmarks.trials
	! command -v valgrind > /dev/null || $(BIN)/python -m benchmarks.instructions --write

gpu: $(NATIVE)  ## everything that needs a GPU, in about nine minutes; writes docs/gpu.md
	$(BIN)/python -m tools.gpu

bench-clients: $(CLIENTS_STAMP) $(NATIVE)  ## a training step and inference of other people's models, beside torch.autocast
	$(CLIENTS)/bin/python -m benchmarks clients

clean:  ## remove the environment and all caches
	rm -rf src/precast/weights/native/compiled $(VENV) .venvs .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
