# Four commands run everything: make demo, make test, make check, make bench; two of them on real SGLang: make demo-sglang, make test-sglang; real agents: make test-agents.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_DIR ?= runs/parcels-$(shell date +%Y%m%d-%H%M%S)
SEED ?= 0

.PHONY: demo demo-sglang test test-agents test-sglang check bench format learn-matrix

demo: $(STAMP)  ## train the demo's tool-using agent; takes a few minutes on two cores
	$(BIN)/rlagent train --config examples/parcels/run.toml --run-dir $(RUN_DIR) --set run.seed=$(SEED)

demo-sglang: $(STAMP)  ## the demo on a real SGLang server, on the CPU: slower, and shorter
	python=$$(tests/sglang/make_venv.sh 0.5.21) && $(BIN)/rlagent train --config examples/parcels/sglang.toml --run-dir $(RUN_DIR)-sglang \
		--set run.seed=$(SEED) --set engine.sglang.python=$$python

test: $(STAMP)  ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not sglang and not agents"

# An environment of its own (1.7 GB, a minute or two to make), because SGLang's pins are not ours. No GPU is needed.
test-sglang: $(STAMP)  ## the engine's contract and the weight sync against real SGLang servers on the CPU
	python=$$(tests/sglang/make_venv.sh 0.5.21) && RLAGENT_REQUIRE_SGLANG=1 RLAGENT_SGLANG_PYTHON=$$python \
		$(BIN)/python -m pytest -m sglang --durations 10 tests/sglang
	python=$$(tests/sglang/make_venv.sh 0.5.23) && RLAGENT_REQUIRE_SGLANG=1 RLAGENT_SGLANG_PYTHON=$$python \
		$(BIN)/python -m pytest -m sglang tests/sglang/test_engine_contract.py

# Three environments of their own (a minute and 1.3 GB together), because the agents' pins are not ours. Nothing beyond loopback is reached.
test-agents: $(STAMP)  ## real agents, unmodified, against the router; SmolLM2 trained for two steps
	python=$$(tests/agents/make_venv.sh) && openenv=$$(tests/agents/make_venv.sh $${RLAGENT_AGENTS_DIR:-.}/.venv-openenv openenv-constraints.txt) && bin=$${RLAGENT_AGENTS_BIN-$$(tests/agents/make_npm.sh)} && model=$$(PYTHON=$(BIN)/python examples/smollm2/get_model.sh) && \
		RLAGENT_REQUIRE_AGENTS=1 RLAGENT_AGENTS_PYTHON=$$python RLAGENT_OPENENV_PYTHON=$$openenv RLAGENT_AGENTS_BIN=$$bin RLAGENT_SMOLLM2=$$model $(BIN)/python -m pytest -n 2 -m agents --durations 5 tests/agents

check: $(STAMP)  ## format, lint, types, the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p rlagent
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu" tests/unit tests/property

bench: $(STAMP)  ## every benchmark; each prints a table and the machine
	for script in $$(ls benchmarks/*.py | grep -v "learn_matrix\|learner_trl\|small_envs"); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

learn-matrix: $(STAMP)  ## the demo with grpo, rloo, ppo + critic, cispo and gspo; writes docs/learn_matrix.md
	$(BIN)/python benchmarks/learn_matrix.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch comes first and by its exact pin: asked for later, through another package, pip would take a build with CUDA.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "rlagent needs Python 3.11: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV), once: PyTorch and everything else in constraints.txt, 2.7 GB; about two minutes where the package index is near"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@echo "PyTorch is in; now the rest, about a minute"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps bfcl-eval==2026.3.23  # its pins are not ours
	touch $(STAMP)
