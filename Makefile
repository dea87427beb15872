# Two commands are enough: `make run` and `make test`. Both make `.venv` and install into it if that was not done yet.
# Needed: make, Python 3.11 or newer, a package index. Options of pip pass through the environment, PIP_INDEX_URL say.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt

# OpenMP threads that spin while they wait make small models up to ten times slower on two cores.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help run run-all test test-all test-newest test-portable mutants report docs bench atlas clean clean-venv

help:
	@echo 'make run            train every config, audit the bug zoo, draw the report'
	@echo 'make run-all        the same, with more seeds and in long forms'
	@echo 'make test           linter, types, tests, and examples of documents'
	@echo 'make test-all       the same, with the slow tests'
	@echo 'make test-newest    types and tests with the newest release of every package'
	@echo 'make test-portable  the numerical tests, as on other machines'
	@echo 'make mutants        break lines of the project; a test has to notice each'
	@echo 'make report         draw the report again, from the records in results/'
	@echo 'make docs           build the documentation into docs/_build/'
	@echo 'make bench          measure this project beside its peers'
	@echo 'make atlas          audit the losses of public packages, in a venv of its own'
	@echo 'make clean          delete caches and built documents, not results/ or .venv'
	@echo 'make clean-venv     delete .venv and .venv-newest'

run: $(VENV)/installed-run
	$(BIN)/stopgrad run configs
	$(BIN)/stopgrad zoo

# A longer form that changes no record of a seed, more seeds say, adds to the records; any other stands beside them.
run-all: run
	$(BIN)/stopgrad run configs/em_*.toml --set seeds=20
	$(BIN)/stopgrad run configs/adversarial_*.toml configs/rbm_bars_and_stripes.toml configs/rbm_defaults.toml --set seeds=5
	$(BIN)/stopgrad run configs/adversarial_methods.toml --set steps=200 --set seeds=3
	$(BIN)/stopgrad run configs/adversarial_steps.toml --set attack_steps=[1,2,5,10,20,40] --set steps=40 --set worst_starts=4 --set worst_steps=200
	$(BIN)/stopgrad run configs/adversarial_overfitting.toml --set steps=800 --set ensemble=[0.1,0.3] --set seeds=3
	$(BIN)/stopgrad run configs/adversarial_trades.toml --set steps=400 --set ensemble=[0.1,0.2,0.3]
	$(BIN)/stopgrad run configs/bilevel_maml.toml configs/policy_gradient_digits.toml --set steps=200
	$(BIN)/stopgrad run configs/policy_gradient_gridworld.toml configs/stochastic_importance.toml --set steps=100
	$(BIN)/stopgrad run configs/rbm_bias.toml --set steps=540
	$(BIN)/stopgrad run configs/rbm_mean_field.toml --set steps=1000
	$(BIN)/stopgrad run configs/self_supervised_simsiam.toml --set steps=200
	$(BIN)/stopgrad run configs/self_supervised_data2vec.toml configs/weighting_mixstyle.toml --set steps=150
	$(BIN)/stopgrad run configs/adversarial_vat.toml --set steps=200 --set ensemble=[0.5,1.0]
	$(BIN)/stopgrad run configs/rbm_bars_and_stripes.toml --set steps=3000
	$(BIN)/stopgrad run configs/rbm_straight_through.toml --set steps=600 --set learning_rate=0.5
	$(BIN)/stopgrad run configs/rbm_persistent.toml --set steps=480 --set learning_rate=0.5

report: $(VENV)/installed-run
	$(BIN)/stopgrad report

# One process of tests a core; a file stays in one, with its fixtures, and the examples of a document, which build on
# each other. The order of files is that of `conftest.py`. Compiled tests are kept: to rewrite their assertions takes as
# long as to collect them.
test: TESTS = -m "not slow"
test test-all: export PYTHONDONTWRITEBYTECODE :=
test test-all: $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses auto --dist loadscope --no-loadscope-reorder $(TESTS)

# Without `constraints.txt`, as a user installs. A comment for the type checker may be needed with one torch alone.
test-newest:
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable . --group test --group check
	$(VENV)-newest/bin/mypy --no-warn-unused-ignores
	$(VENV)-newest/bin/python -m pytest --numprocesses auto --dist loadscope --no-loadscope-reorder -m "not slow"

test-portable: $(VENV)/installed-test
	$(BIN)/python tests/machines.py

mutants: $(VENV)/installed-test
	$(BIN)/python tests/mutants.py

docs: $(VENV)/installed-docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build
	@echo 'documentation: $(CURDIR)/docs/_build/index.html'

bench: $(VENV)/installed-test
	$(BIN)/python -m benchmarks

atlas:
	$(PYTHON) -m venv $(VENV)-atlas
	$(VENV)-atlas/bin/python -m pip install --quiet --requirement benchmarks/atlas/requirements.txt
	$(VENV)-atlas/bin/python -m pip install --quiet --editable .
	$(VENV)-atlas/bin/python -m benchmarks atlas

clean:
	rm -rf docs/_build docs/gallery dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv:
	rm -rf $(VENV) $(VENV)-newest

# Each stamp is newer than what it was installed from, so a second `make` installs nothing.
$(VENV)/installed-run: pyproject.toml constraints.txt
	@$(MAKE_VENV)
	@echo 'Installing into $(VENV): about a minute, most of it torch.'
	@$(INSTALL) pip
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed-run
	@echo 'Installing what the tests need.'
	@$(INSTALL) --group test --group check
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed-run
	@echo 'Installing what the documentation needs; its page of all blocks asks the programs of the tests.'
	@$(INSTALL) --group docs --group test
	@touch $@

# Debian keeps `ensurepip` in a package of its own. Without it, a pip or a uv that is there already can fill the venv.
define MAKE_VENV
set -e; \
if $(BIN)/python -m pip --version >/dev/null 2>&1; then \
    :; \
elif ! command -v $(PYTHON) >/dev/null; then \
    echo 'error: $(PYTHON) was not found. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python'; exit 1; \
elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
    echo "error: Python 3.11 or newer is needed. Found $$($(PYTHON) -V). Name a newer one: make PYTHON=/path/to/python"; exit 1; \
elif $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
    $(PYTHON) -m venv $(VENV); \
elif $(PYTHON) -c 'import pip, venv' 2>/dev/null; then \
    $(PYTHON) -m venv --without-pip $(VENV); \
    $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python install --quiet pip; \
elif command -v uv >/dev/null; then \
    uv venv --quiet --seed --python $(PYTHON) $(VENV); \
else \
    echo 'error: $(PYTHON) can make no virtual environment: its module ensurepip is missing.'; \
    echo 'On Debian and Ubuntu: apt-get install python3-venv. Or make $(VENV) by other means, and run make again.'; exit 1; \
fi
endef
