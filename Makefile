# `make repro` and `make test` make the environment themselves; `make help` lists the rest.
# TORCH=cpu|gpu forces a lock. By default what is installed stays, since jobs may run from it, and in a new clone the GPU
# lock is taken where an NVIDIA driver answers.
INSTALLED := $(patsubst .venv/.installed-%,%,$(firstword $(wildcard .venv/.installed-*)))
TORCH ?= $(or $(INSTALLED),$(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu))
PYTHON ?= python3
PORT ?= 5000
LOCK := requirements.$(TORCH).lock
$(if $(filter cpu gpu,$(TORCH))$(wildcard $(LOCK)),,$(error error: TORCH: got '$(TORCH)', accepts cpu or gpu))
$(if $(filter-out default gpu,$(PRESET)),$(error error: PRESET: got '$(PRESET)', accepts default or gpu))
STAMP := .venv/.installed-$(TORCH)
# The benchmarks' peers stay out of .venv; they are compared on the CPU, so there is one lock.
BENCH_LOCK := requirements.bench.lock
BENCH_STAMP := .venv-bench/.installed
BENCH := PATH="$(CURDIR)/.venv-bench/bin:$$PATH" python
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH"
COMPILE := .venv/bin/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
# A folder with CPU wheels is for the CPU lock alone: uv would take them for CUDA's too.
LINKS := $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)")
# Two workers, each of which takes whole modules: long ones first, by tests/conftest.py.
TWO := -n 2 --dist loadscope --no-loadscope-reorder
LOCKING := $(COMPILE) pyproject.toml --extra dev
# Where Python may not keep its bytecode, every stage compiles torch again, for seconds.
unexport PYTHONDONTWRITEBYTECODE
# A user's model may look at the order of a set; stages begin again where this is not so.
export PYTHONHASHSEED := 0

.PHONY: help repro verify up test test-all attacks coverage mutations faults gpu-check rehearse screenshots bench docs lint audit sbom format ui lock clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z.%-]*\):.*##/\1 -/p' $(MAKEFILE_LIST)

.venv: $(STAMP)  ## the environment alone

$(STAMP): $(LOCK) requirements.uv.lock pyproject.toml
	@sh tools/install.sh "$(PYTHON)" "$(LOCK)" .venv
	@rm -f .venv/.installed-* .venv/.compiled
	@touch $@

$(BENCH_STAMP): $(BENCH_LOCK) requirements.uv.lock pyproject.toml
	@sh tools/install.sh "$(PYTHON)" "$(BENCH_LOCK)" .venv-bench
	@touch $@

# DVC would keep pickles where all users of this host can write.
OWN_CACHE := [ -n "$$DVC_SITE_CACHE_DIR" ] || { (umask 077; mkdir -p "$$HOME/.cache/samebits") 2>/dev/null && \
	export DVC_SITE_CACHE_DIR="$$HOME/.cache/samebits/dvc"; } || true

repro: $(STAMP)  ## run the pipeline, and print what it found; PRESET=default or gpu, see docs/concepts/gpu-experiment.md
	@# Who imports torch first compiles it, for seconds: another core can, while DVC starts and the data are made.
	@$(OWN_CACHE); export $(RUN); [ -e .venv/.compiled ] || { touch .venv/.compiled; python -c 'import torch._dynamo' & }; exec sh tools/repro.sh

verify: $(STAMP)  ## train the exact runs again and compare their bits with dvc.lock
	@export $(RUN); folder=$$(python tools/preset.py) && exec samebits verify --folder "$$folder"

test: $(STAMP)  ## the tests that take minutes: every promise once
	@$(RUN) exec python -m pytest -m "not slow and not container" $(TWO)

test-all: $(STAMP)  ## all tests that this host can run, in groups; ends with a table of them
	@$(RUN) exec python tools/run_tests.py

test-%: $(STAMP)  ## one group: quick four-gpus shared exact training pipeline browser nodes container rehearsal faults gpu
	@$(RUN) exec python tools/run_tests.py $*

attacks: $(STAMP)  ## what other users, servers, repositories and strangers try, as a table; with root, a second user too
	@$(RUN) exec python tools/attacks.py

coverage: $(STAMP)  ## test-all, and which lines of the library it reaches, also in stages and workers; ONLY=exact is one group
	@$(RUN) coverage erase
	@export $(RUN); python tools/run_tests.py --coverage $(ONLY); code=$$?; \
		coverage combine --quiet && \
		if [ "$(ONLY)" ]; then coverage report --fail-under=0; else coverage report && python tools/excepts.py; fi && exit $$code

mutations: $(STAMP)  ## 300 random changes of the library, and which the tests notice; hours; CHANGES=20 SEED=1
	@$(RUN) exec python tools/mutate.py --changes $(or $(CHANGES),300) --seed $(or $(SEED),0)

gpu-check: $(STAMP)  ## all of it on a host with GPUs, into gpu-check.json, a file to send back; ONLY=tests is one step
	@$(RUN) exec python tools/gpu_check.py $(if $(ONLY),--only $(ONLY))

.venv-gpu/.installed: requirements.gpu.lock tools/install.sh
	@sh tools/install.sh "$(PYTHON)" requirements.gpu.lock .venv-gpu
	@touch $@

rehearse:  ## trainings on CUDA tensors without a GPU; needs a C compiler, and several GB for CUDA's PyTorch
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || \
		{ echo "error: no C compiler. hint: apt install gcc" >&2; exit 3; }
	@$(MAKE) --no-print-directory test-rehearsal

faults: $(STAMP)  ## kill, damage and fill up whatever can be, for MINUTES=10; ONLY=kills/17 does one of them again
	@$(RUN) PYTHONPATH=tools:tests exec python -m faults --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0) \
		$(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT))

screenshots: $(STAMP)  ## the guide's pictures, from a real MLflow server and Chromium
	@mkdir -p docs/guides/images
	@$(RUN) SAMEBITS_SCREENSHOTS="$(CURDIR)/docs/guides/images" python -m pytest tests/system/test_browser.py \
		tests/system/test_page.py::test_the_example_of_the_docs_is_a_page_of_a_real_run

# What the host is not made for ends with 3; each that fails is named, and the page is of what there is.
BENCHMARKS := loop loading ddp rounding bits exact model_coverage trainings quality startup memory memory_forecast repro own_repository \
	tracking sender many_logs explain scale container nodes sampler

bench: $(BENCH_STAMP)  ## measure against bare PyTorch and other loops, start-up, tracking, memory; writes benchmarks/results
	@failed=; for script in $(or $(ONLY),$(BENCHMARKS)); do \
		$(BENCH) benchmarks/$$script.py || { code=$$?; [ $$code -eq 3 ] || failed="$$failed $$script:$$code"; }; done; \
		$(BENCH) tools/benchmark_page.py; [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

.venv-docs/.installed: requirements.docs.lock tools/install.sh
	@sh tools/install.sh "$(PYTHON)" requirements.docs.lock .venv-docs
	@touch $@

docs: .venv-docs/.installed  ## the documentation as pages, build/docs/index.html; a warning is an error
	@.venv-docs/bin/python -m sphinx --builder html --fail-on-warning --keep-going --nitpicky --quiet docs build/docs
	@echo build/docs/index.html

.venv-lint/.installed: requirements.lint.lock tools/install.sh
	@sh tools/install.sh "$(PYTHON)" requirements.lint.lock .venv-lint
	@touch $@

lint: $(STAMP) .venv-lint/.installed  ## ruff and mypy; hadolint, shellcheck, manifests, and what the hosting site reads
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@.venv-lint/bin/hadolint Dockerfile .ci/*.Dockerfile
	@.venv-lint/bin/shellcheck tools/*.sh $(filter-out %.Dockerfile,$(wildcard .ci/*))
	@PYTHONPATH=tests .venv/bin/python tests/engines/print_manifests.py | .venv-lint/bin/python tools/check_manifests.py
	@.venv-lint/bin/zizmor --offline --quiet .github
	@.venv-lint/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@.venv-lint/bin/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	@.venv-lint/bin/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	@.venv-lint/bin/check-jsonschema --quiet --default-filetype yaml --builtin-schema vendor.citation-file-format CITATION.cff

audit: .venv-lint/.installed  ## known vulnerabilities of what the locks hold, as far as the package index tells
	@.venv-lint/bin/python tools/audit.py

sbom: .venv-lint/.installed  ## what the locks hold, as CycloneDX: build/sbom/*.cdx.json
	@mkdir -p build/sbom
	@for lock in requirements.*.lock; do .venv-lint/bin/cyclonedx-py requirements --pyproject pyproject.toml \
		--output-reproducible --output-file "build/sbom/$${lock%.lock}.cdx.json" "$$lock" || exit; done
	@ls build/sbom/*

format: $(STAMP)  ## let ruff rewrite the sources
	@$(RUN) ruff format . && $(RUN) ruff check --fix .

up:  ## the pipeline in containers, with MLflow on http://localhost:5000; see docs/guides/containers.md
	@sh tools/env.sh
	@docker image inspect $$(docker compose config --images) >/dev/null 2>&1 || \
		{ docker compose build && sh tools/env.sh; }
	@docker compose up

ui: $(STAMP)  ## the MLflow UI on http://127.0.0.1:5000; PORT=N takes another port
	@$(RUN) exec samebits ui --port $(PORT)

lock: $(STAMP)  ## resolve the locks again; LOCKFLAGS=--upgrade takes newer versions
	$(LOCKING) --extra cpu $(LINKS) $(LOCKFLAGS) -o requirements.cpu.lock
	$(LOCKING) --extra gpu $(LOCKFLAGS) -o requirements.gpu.lock
	$(LOCKING) --extra cpu --extra bench -c requirements.cpu.lock $(LINKS) $(LOCKFLAGS) -o $(BENCH_LOCK)
	$(COMPILE) --group docs --constraints requirements.cpu.lock $(LINKS) $(LOCKFLAGS) -o requirements.docs.lock
	$(COMPILE) --group lint $(LOCKFLAGS) -o requirements.lint.lock
	sed -n '/^uv==/,$$p' requirements.cpu.lock | awk 'NR > 1 && /^[^ ]/ {exit} {print}' > requirements.uv.lock

# What the stages write, by tools/generate.py.
MADE := data files.json gpu/data gpu/files.json gpu/host.json gpu/reports gpu/runs gpu/source.json host.json reports runs source.json

clean:  ## remove what the pipeline made; the environment stays
	rm -rf build $(MADE) dvc_plots .samebits
