# make train: LunarLander through two local workers. make test: the whole suite. make lint: style.
PYTHON ?= python3

.PHONY: train test lint
train: .venv/installed
	.venv/bin/python ppo_clusterenv.py

test: .venv/installed
	.venv/bin/python -m pytest -n 3 --dist worksteal

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/shellcheck -x slurm/*.sbatch slurm/*.sh .ci/run

.venv/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -r requirements.txt
	touch $@
