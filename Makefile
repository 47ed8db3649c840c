# `make repro` and `make test` make the environment themselves; `make help` lists the rest.
# TORCH=cpu|gpu forces a lock; by default the GPU one is taken where an NVIDIA driver answers.
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
PYTHON ?= python3
PORT ?= 5000
LOCK := requirements.$(TORCH).lock
STAMP := .venv/.installed-$(TORCH)
# The benchmarks' peers stay out of .venv; they are compared on the CPU, so there is one lock.
BENCH_LOCK := requirements.bench.lock
BENCH_STAMP := .venv-bench/.installed
BENCH := PATH="$(CURDIR)/.venv-bench/bin:$$PATH" python
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH"
COMPILE := .venv/bin/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
# A folder with CPU wheels is for the CPU lock alone: uv would take them for CUDA's too.
LINKS := $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)")
LOCKING := $(COMPILE) pyproject.toml --extra dev

.PHONY: help repro verify up test test-fast test-gpu test-container screenshots bench docs lint format ui lock clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z.-]*\):.*##/\1 -/p' $(MAKEFILE_LIST)

.venv: $(STAMP)  ## the environment alone

$(STAMP): $(LOCK) requirements.uv.lock pyproject.toml
	@sh tools/install.sh "$(PYTHON)" "$(LOCK)" .venv
	@rm -f .venv/.installed-*
	@touch $@

$(BENCH_STAMP): $(BENCH_LOCK) requirements.uv.lock pyproject.toml
	@sh tools/install.sh "$(PYTHON)" "$(BENCH_LOCK)" .venv-bench
	@touch $@

repro: $(STAMP)  ## run the pipeline: prepare, train, evaluate, compare
	@$(RUN) exec dvc repro
	@echo "Table: reports/comparison.md. Report: reports/index.html. Runs in MLflow: make ui. Elsewhere: docs/guides/first-run.md."

verify: $(STAMP)  ## train the exact runs again and compare their bits with dvc.lock
	@$(RUN) exec samebits verify

test: $(STAMP)  ## run all tests that this host can run
	@$(RUN) exec python -m pytest

test-fast: $(STAMP)  ## the tests that take seconds
	@$(RUN) exec python -m pytest -m "not slow"

test-gpu: $(STAMP)  ## the tests that need an NVIDIA GPU
	@$(RUN) python -m pytest tests/gpu

screenshots: $(STAMP)  ## the guide's pictures, from a real MLflow server and Chromium
	@mkdir -p docs/guides/images
	@$(RUN) SAMEBITS_SCREENSHOTS="$(CURDIR)/docs/guides/images" python -m pytest tests/test_browser.py

bench: $(BENCH_STAMP)  ## measure against bare PyTorch and other loops, start-up, tracking, memory; writes benchmarks/results
	@$(BENCH) benchmarks/loop.py
	@$(BENCH) benchmarks/ddp.py
	@$(BENCH) benchmarks/rounding.py
	@$(BENCH) benchmarks/bits.py
	@$(BENCH) benchmarks/exact.py
	@$(BENCH) benchmarks/quality.py
	@$(BENCH) benchmarks/startup.py
	@$(BENCH) benchmarks/memory.py
	@$(BENCH) benchmarks/repro.py
	@$(BENCH) benchmarks/tracking.py
	@$(BENCH) benchmarks/sender.py
	@$(BENCH) benchmarks/container.py || echo "benchmarks/container.py is left out: see above"
	@$(BENCH) tools/benchmark_page.py

.venv-docs/.installed: requirements.docs.lock tools/install.sh
	@sh tools/install.sh "$(PYTHON)" requirements.docs.lock .venv-docs
	@touch $@

docs: .venv-docs/.installed  ## the documentation as pages, build/docs/index.html; a warning is an error
	@.venv-docs/bin/python -m sphinx --builder html --fail-on-warning --keep-going --nitpicky --quiet docs build/docs
	@echo build/docs/index.html

.venv-lint/.installed: requirements.lint.lock tools/install.sh
	@sh tools/install.sh "$(PYTHON)" requirements.lint.lock .venv-lint
	@touch $@

lint: $(STAMP) .venv-lint/.installed  ## ruff, mypy, hadolint and shellcheck
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@.venv-lint/bin/hadolint Dockerfile .ci/*.Dockerfile
	@.venv-lint/bin/shellcheck tools/*.sh $(filter-out %.Dockerfile,$(wildcard .ci/*))

format: $(STAMP)  ## let ruff rewrite the sources
	@$(RUN) ruff format . && $(RUN) ruff check --fix .

up:  ## the pipeline in containers, with MLflow on http://localhost:5000; see docs/guides/containers.md
	@sh tools/env.sh
	@docker image inspect $$(docker compose config --images) >/dev/null 2>&1 || \
		{ docker compose build && sh tools/env.sh; }
	@docker compose up

test-container: $(STAMP)  ## the tests that need a Docker engine
	@$(RUN) exec python -m pytest tests/container

ui: $(STAMP)  ## the MLflow UI on http://127.0.0.1:5000; PORT=N takes another port
	@$(RUN) exec samebits ui --port $(PORT)

lock: $(STAMP)  ## resolve the locks again; LOCKFLAGS=--upgrade takes newer versions
	$(LOCKING) --extra cpu $(LINKS) $(LOCKFLAGS) -o requirements.cpu.lock
	$(LOCKING) --extra gpu $(LOCKFLAGS) -o requirements.gpu.lock
	$(LOCKING) --extra cpu --extra bench -c requirements.cpu.lock $(LINKS) $(LOCKFLAGS) -o $(BENCH_LOCK)
	$(COMPILE) --group docs --constraints requirements.cpu.lock $(LINKS) $(LOCKFLAGS) -o requirements.docs.lock
	$(COMPILE) --group lint $(LOCKFLAGS) -o requirements.lint.lock
	sed -n '/^uv==/,$$p' requirements.cpu.lock | awk 'NR > 1 && /^[^ ]/ {exit} {print}' > requirements.uv.lock

clean:  ## remove what the pipeline made; the environment stays
	rm -rf build data runs reports dvc_plots host.json source.json files.json .samebits
