# `make demo` and `make test` work in a fresh clone: both make the virtual environment themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROCESSES ?= 2
TEST_JOBS ?= 2

# One thread a process: the processes share the cores, and threads on top of them only wait.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests are compiled once, and not by each of the processes that they start.
unexport PYTHONDONTWRITEBYTECODE
BENCH := PYTHONPATH=examples:benchmarks:benchmarks/progress:benchmarks/speed $(BIN)/python benchmarks

.DEFAULT_GOAL := help
.PHONY: help fuzz soak elastic-soak venv demo demo-figure systems progress language-model tasks larger sensitivity rates defaults widths curvature-uses fosi-gain bounded papers bench against compiled rivals structure launches measured memory coverage gpu faults compatibility reference test test-thorough mutants lint types pytest docs format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 22

venv: $(STAMP) ## make .venv, or update it after a change of pyproject.toml, setup.cfg or constraints.txt

# setuptools comes first, so that building the package needs nothing that is not pinned.
$(STAMP): pyproject.toml setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt setuptools
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[dev,docs]'
	touch $@

demo: venv ## a transformer and an autoencoder with AdamW, Adam, Muon and KAISA: tables and demo.png
	PYTHONPATH=benchmarks $(BIN)/torchrun --standalone --nproc-per-node=$(PROCESSES) \
		benchmarks/progress/demo.py $(ARGS)

demo-figure: venv ## the picture of the overview page and its stored run: three minutes
	PYTHONPATH=benchmarks $(BIN)/torchrun --standalone --nproc-per-node=2 \
		benchmarks/progress/demo.py --steps 500 \
		--figure docs/figures/demo.png --json benchmarks/results/demo.json

systems: venv ## train on digits with SGD, Adam and every optimizer, two processes: a table and systems.png
	PYTHONPATH=benchmarks $(BIN)/torchrun --standalone --nproc-per-node=$(PROCESSES) \
		benchmarks/progress/systems.py $(ARGS)

progress: venv ## steps and seconds to a target, SGD, Adam and KAISA, five seeds: some minutes
	$(BENCH)/progress/progress.py \
		--json benchmarks/results/progress.json $(ARGS)

language-model: venv ## a small transformer: AdamW, Muon, SOAP, SGD and KAISA, tuned: most of an hour
	$(BENCH)/progress/language.py \
		--json benchmarks/results/language.json $(ARGS)
	$(BENCH)/progress/plot_language.py benchmarks/results/language.json --out docs/figures/language.png

tasks: venv ## nine small tasks: tuned rivals, and KAISA with default settings: two hours; ARGS=--keep-rivals
	$(BENCH)/progress/tuned_rivals.py \
		--json benchmarks/results/tasks.json $(ARGS)

larger: venv ## a transformer of ten million parameters, AdamW tuned and KAISA over it: two to three hours
	$(BENCH)/progress/larger.py \
		--json benchmarks/results/larger.json $(ARGS)

sensitivity: venv ## how often KAISA ends above its base, by learning rate and warm-up: half an hour
	$(BENCH)/progress/sensitivity.py \
		--json benchmarks/results/sensitivity.json $(ARGS)

rates: venv ## loss at the end by learning rate, AdamW, Muon and KAISA: six minutes
	$(BENCH)/progress/rates.py --json benchmarks/results/rates.json $(ARGS)

defaults: venv ## every candidate for a default on six tasks: most of an hour
	$(BENCH)/progress/defaults.py \
		--json benchmarks/results/defaults.json $(ARGS)

widths: venv ## best learning rate and damping of models of width 64 to 512: half an hour
	$(BENCH)/progress/widths.py \
		--json benchmarks/results/widths.json $(ARGS)

curvature-uses: venv ## what a trained model's curvature is good for: the four examples, two minutes
	$(BENCH)/progress/curvature_uses.py \
		--json benchmarks/results/curvature_uses.json $(ARGS)

fosi-gain: venv ## what DHO2 gains over a tuned Adam, where it may and where not: some minutes
	$(BENCH)/progress/fosi_gain.py \
		--json benchmarks/results/fosi_gain.json $(ARGS)

bounded: venv ## fifty trainings with full Newton steps, with a trust region and without: minutes
	$(BENCH)/progress/bounded.py \
		--json benchmarks/results/bounded.json $(ARGS)

papers: venv ## each headline claim of the four papers next to our value: under ten minutes
	$(BENCH)/papers/papers.py \
		--json benchmarks/results/papers.json --page docs/evidence/papers.md $(ARGS)

bench: venv ## step time, memory and bytes sent of every optimizer, against SGD: most of an hour
	$(BENCH)/speed/speed.py --json benchmarks/results/speed.json $(ARGS)
	$(BENCH)/speed/plot_speed.py benchmarks/results/speed.json --out docs/figures/speed.png

against: venv ## step times against those of another commit, whose src ARGS names: some minutes
	$(BENCH)/speed/against.py --json benchmarks/results/against.json $(ARGS)

compiled: venv ## what hooks cost a compiled model, with statistics and without: some minutes
	$(BENCH)/speed/compiled.py --json benchmarks/results/compiled.json $(ARGS)

rivals: venv ## eigenvalues, trace, diagonal and density beside curvlinops, which it asks for: seconds
	$(BENCH)/speed/curvature_rivals.py \
		--json benchmarks/results/curvature_rivals.json $(ARGS)

structure: venv ## files, functions and lines that a step of each system takes a reader through
	$(BENCH)/reading/structure.py --json benchmarks/results/structure.json $(ARGS)

launches: venv ## what a step asks of a GPU: launches, waits and uploads of each system: minutes
	$(BENCH)/speed/launches.py --json benchmarks/results/launches.json $(ARGS)

measured: venv ## what `measure` costs beside bare passes, in time and memory: a minute
	$(BENCH)/speed/measured.py --json benchmarks/results/measured.json $(ARGS)

memory: venv ## bytes of state per parameter of KAISA, AdamW, Muon, SOAP and Shampoo: some minutes
	$(BENCH)/speed/memory.py --json benchmarks/results/memory.json $(ARGS)

coverage: venv ## the share of well-known models that KAISA preconditions, from their sizes: seconds
	$(BENCH)/speed/layer_coverage.py --json benchmarks/results/coverage.json $(ARGS)

gpu: venv ## all that a GPU should answer, in one table: under eight minutes; ARGS=--tiny without one
	$(BENCH)/speed/gpu.py --json benchmarks/results/gpu.json $(ARGS)

many-ranks: venv ## one rank of 64, 1,024 and 4,096: its messages, memory and time, simulated: many minutes
	$(BENCH)/speed/many_ranks.py --json benchmarks/results/many_ranks.json $(ARGS)
	$(BENCH)/speed/many_ranks.py --resnet --first --ranks 64 4096 \
		--systems "KAISA MEM-OPT" DPKFAC --json benchmarks/results/many_ranks.json

faults: venv ## hundreds of faults in small trainings, and what becomes of each: many minutes
	$(BIN)/python tests/faults/faults.py --jobs 3 --json benchmarks/results/faults.json $(ARGS)

elastic-soak: venv ## kill processes of a training at random, resume on others: many minutes
	PYTHONPATH=examples $(BIN)/python tests/faults/elastic_soak.py --torchrun \
		--optimizer kaisa dpkfac distkfac dho2 mrdho2 --json benchmarks/results/elastic.json $(ARGS)
fuzz: venv ## random trainings of every optimizer, ARGS="--examples 1000" or fifty: some minutes
	$(BIN)/python tests/fuzz/fuzz.py --json benchmarks/results/fuzz.json $(ARGS)

soak: venv ## fifty thousand steps of every optimizer: does memory or a step's time grow? minutes
	$(BIN)/python tests/faults/soak.py --json benchmarks/results/soak.json $(ARGS)

compatibility: venv ## run the tests of training stacks, and write docs/reference/compatibility.md: a minute
	$(BIN)/python tests/compatibility.py

reference: venv ## write docs/reference/api.md and options.md from the docstrings: seconds
	$(BIN)/python docs/make_reference.py

test: lint types pytest docs ## everything that must hold: linter, types, tests with coverage, docs

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: venv
	$(BIN)/mypy

# Bytecode is written, because each of the tests' processes would compile all modules.
pytest: venv
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest \
		-n $(TEST_JOBS) --dist worksteal --cov --cov-report=term $(ARGS)

test-thorough: venv ## the tests with other random examples in each run, 300 for each property: hours
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal --timeout 0 $(ARGS)

mutants: venv ## small faults put into the source, one at a time: do the tests notice? some ten minutes
	$(BIN)/python tests/mutants.py --jobs $(TEST_JOBS) \
		--json benchmarks/results/mutants.json $(ARGS)

docs: venv ## build the documentation into site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: venv ## rewrite the code in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what the other targets made, .venv too
	rm -rf $(VENV) site build dist .coverage .coverage.* htmlcov demo.png systems.png spectrum.png
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
