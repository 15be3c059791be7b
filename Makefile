# make train: LunarLander on two local workers. make test: the suite. make test-all: also the long tests.
# make test-versions: the suite on Python 3.12 and 3.13, and with the lowest and newest packages; takes an hour.
# make test-algorithms: tests of what the scripts compute, learn and resume. make lint: style. make docs: the site.
# make results: all of experiments/benchmarks/results.md. Takes some hours of an idle machine, and can be interrupted.
# make figures: a small version of the figures, in runs/quick. make all-figures: experiments/figures/; takes hours.
PYTHON ?= python3

.PHONY: train test test-all test-versions test-algorithms lint docs results figures all-figures
train: .venv/installed
	.venv/bin/python ppo_clusterenv.py

test-algorithms: .venv/installed
	.venv/bin/python -m pytest -n 4 --dist worksteal tests/algorithms

test: .venv/installed
	.venv/bin/python -m pytest -n 4 --dist worksteal -m "not long"

test-all: .venv/installed
	.venv/bin/python -m pytest -n 4 --dist worksteal

# Finished runs are skipped, and failed runs are tried again next time. In reverse order, PPO comes first.
RUN = for file in $$(ls -r $(1)/*.yaml); do \
	.venv/bin/python experiments/sweeps/run.py $$file --output $(2)/$$(basename $$file .yaml) || test $$? -eq 1 || exit; done

results: .venv/installed
	.venv/bin/python -m experiments.results $(RESULTS)

figures: .venv/installed
	$(call RUN,experiments/figures/recipes/quick,runs/quick)
	.venv/bin/python -m experiments.figures.collect --sweeps experiments/figures/recipes/quick --runs runs/quick --results runs/quick/results
	.venv/bin/python -m experiments.figures.plot --results runs/quick/results --output runs/quick

all-figures: .venv/installed
	$(call RUN,experiments/figures/recipes/main,runs/main)
	.venv/bin/python -m experiments.figures.collect
	.venv/bin/python -m experiments.figures.plot

test-versions:
	for name in 3.12 3.13 lowest newest; do tests/versions.sh $$name || exit; done

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/shellcheck -x slurm/*.sbatch slurm/*.sh tests/*.sh .ci/run

docs: .venv/installed
	.venv/bin/python -m pip install -r docs/requirements.txt
	.venv/bin/python -m docs.site
	.venv/bin/zensical build --config-file build/mkdocs.yml --strict --clean
	cd build/docs && find . -name '*.md' -exec cp --parents {} ../site ';'  # the Markdown that llms.txt links to

.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -r requirements.txt
	.venv/bin/python -m pip install --no-deps -e .
	touch $@
