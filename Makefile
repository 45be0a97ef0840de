# Every target sets up what it needs; all are safe to run twice, and when .venv is half built.
PYTHON ?= python3
PY := .venv/bin/python
FLAGS ?=

.PHONY: train quick test test-all coverage lint docs site bench clean

train: .venv/.run
	.venv/bin/solo train ppo --env-id CartPole-v1 --target-return 500 --capture-video $(FLAGS)

# For the edit loop, under a minute: make quick FILES="ppo dqn"
quick: .venv/.dev
	$(PY) tools/quick.py $(FILES)

# The caches of compiled modules are written whatever the shell says: hundreds of tests start Python.
test test-all coverage: export PYTHONDONTWRITEBYTECODE =

test: .venv/.dev
	$(PY) -m pytest -n 2 --dist worksteal -m "not slow" $(FLAGS)

# What takes minutes, too: wheels, the commands of all pages, cold caches, more kills, more probes.
test-all: .venv/.dev
	$(PY) -m pytest -n 2 --dist worksteal $(FLAGS)

# The same, and how much of the library the tests reach.
coverage: .venv/.dev
	$(PY) -m pytest -n 2 --dist worksteal --cov=solorl --cov-report=term --cov-fail-under=90 $(FLAGS)

lint: .venv/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/solo check

docs: .venv/.dev
	$(PY) docs/terminal.py

# Static pages in site/, which open from the disk: site/index.html
site: .venv/.dev
	$(PY) docs/site/make_site.py $(FLAGS)

bench: .venv/.dev
	$(PY) -m pip install --quiet "stable-baselines3>=2.6" tyro -c requirements-dev.lock
	$(PY) benchmark/ppo_speed.py $(FLAGS)

# A stamp is written only when its installation is complete; without it the environment is made again.
.venv/.run: requirements.lock pyproject.toml
	@test -e .venv/.run || $(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 15) or sys.exit("SoloRL needs Python 3.11 to 3.14, but $(PYTHON) is %d.%d; name another one: make train PYTHON=python3.12" % v)'
	test -e .venv/.run || $(PYTHON) -m venv --clear .venv
	$(PY) -m pip install --quiet --requirement requirements.lock
	$(PY) -m pip install --quiet --no-deps --editable .
	touch .venv/.run

.venv/.dev: .venv/.run requirements-dev.lock
	$(PY) -m pip install --quiet --no-deps --requirement requirements-dev.lock
	touch .venv/.dev

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache htmlcov .coverage*
