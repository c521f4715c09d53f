# The two commands that matter: `make demo` and `make test`. Both set up what they need, once.

TORCH        := torch==2.13.0
TORCH_LATEST := torch>=2.14,<2.16

VENV   := .venv
LATEST := .venv-latest
EXTRAS := dev,jax,docs
ROUNDS := 20
ARGS   ?=

# Some containers set it: each of hundreds of interpreters would then compile ftcomm, and each worker all tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PRECIOUS: %/.made %/.ready %/.compiled
.PHONY: compile-latest help browser demo dist docs test test-kernels test-hosts test-latest test-many test-sweeps test-pythons test-upstream test-ray test-torchtitan test-pipeline supported bench bench-micro setup setup-latest setup-ray setup-torchtitan lint types tree format clean

help: ## this list
	@echo "ftcomm: make <target>, e.g. make demo"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1 - \2/p' $(MAKEFILE_LIST) | awk -F' - ' '{printf "%-14s %s\n", $$1, $$2}'

demo: setup ## train four replicas, kill one inside an all-reduce, watch the others go on (ARGS="--help")
	$(VENV)/bin/ftcomm demo $(ARGS)

# First those that start no processes of a job, so that the kernels' tests fork from one that has no threads of them:
# four at a time, for two cores, since some wait. Then those that do, which wait for longer: six. Both at once keep the
# cores at a load of 30, at which deadlines of tests pass. Whoever is free takes the next one, the longest first
# (tests/conftest.py). A selection may be empty (pytest's exit code 5).
PURE := tests/unit tests/kernels tests/simulation
NEXT := --dist load --maxschedchunk 1
define RUN_TESTS
	@echo "==> $(1): functions, kernels and histories"
	@$(1)/bin/python -m pytest $(PURE) -q -n 4 $(NEXT) $(2) $(ARGS) || test $$? -eq 5
	@echo "==> $(1): jobs of real processes"
	@$(1)/bin/python -m pytest tests $(PURE:%=--ignore=%) -q -n 6 $(NEXT) $(2) $(ARGS) || test $$? -eq 5
endef

test: setup lint types $(VENV)/.compiled ## lint, type check and all tests but sweeps, on the pinned torch
	$(call RUN_TESTS,$(VENV),-m "not sweep")

test-sweeps: setup ## variations of what `make test` shows: other points of a kill, seeds, codes, targets of the compiler
	$(call RUN_TESTS,$(VENV),-m sweep)

test-kernels: setup ## the kernels, and the whole protocol suite with them (in Triton's interpreter): they run ops, over TCP they reduce
	$(VENV)/bin/python -m pytest tests/kernels -q -n 2 $(ARGS)
	FTCOMM_ENGINE=interpreter-kernel $(VENV)/bin/python -m pytest tests/process -q -m protocol $(ARGS)

test-hosts: setup ## jobs on hosts of their own, whose network fails again and again (root; ROUNDS=20)
	FTCOMM_HOST_ROUNDS=$(ROUNDS) $(VENV)/bin/python -m pytest tests/hosts -q $(ARGS)

# No part of `make test`: minutes, in which two cores have a load of 50.
test-many: setup ## 32 members on eight hosts, of which three are killed and come back (root)
	FTCOMM_TEST_MANY=1 $(VENV)/bin/python -m pytest tests/hosts/test_many_members.py -q $(ARGS)

# In one run: no test of a kernel that depends on torch forks, and a second one would first collect all tests again, on
# each of its workers.
test-latest: setup-latest $(LATEST)/.compiled ## every test that depends on torch, on the newest
	@echo "==> $(LATEST): what depends on torch"
	@$(LATEST)/bin/python -m pytest tests -q -n 6 $(NEXT) $(ON_LATEST) $(ARGS) || test $$? -eq 5

PYTHONS := python3.10 python3.11 python3.12 python3.13 python3.14
test-pythons: setup ## a job of NumPy arrays without torch on each Python that there is, with a kill (PYTHONS=/path/to/python3.14)
	$(VENV)/bin/python -m tests.pythons build/pythons $(PYTHONS)

# On both versions of torch, though one has failed; what the page says is then what was found.
UPSTREAM := build/upstream
test-upstream: setup setup-latest ## torch's and torchft's own tests of process groups on ftcomm and gloo, into docs/upstream.md (ARGS="-k barrier": added)
	$(if $(ARGS),,@rm -rf $(UPSTREAM))
	@code=0; for v in $(VENV) $(LATEST); do $$v/bin/python -m tests.upstream --json $(UPSTREAM)/$$v.json $(ARGS) || code=1; done; \
		$(VENV)/bin/python -m tests.upstream --page docs/upstream.md $(UPSTREAM)/$(VENV).json $(UPSTREAM)/$(LATEST).json; exit $$code

# No part of `make test-latest`: Ray starts a dozen processes, which come up in time on a machine without other work.
test-ray: setup-ray ## Ray Train on the newest torch: a worker and the driver are killed
	FTCOMM_TEST_RAY=1 $(LATEST)/bin/python -m pytest tests/ray -q $(ARGS)

# No part of `make test-latest`: it brings 30 packages that nothing else needs.
test-torchtitan: setup-torchtitan ## torchtitan's fault-tolerance hooks on CPUs, and its own tests of them: a replica is killed
	$(LATEST)/bin/python -m pytest tests/integrations/test_torchtitan.py -q $(ARGS)
	cd build && ../$(LATEST)/bin/python -m pytest --pyargs torchtitan.experiments.torchft.tests.test_torchft_checkpoint -q -p no:cacheprovider

# No part of `make test`: processes compile for a minute of two cores, and are 16 at a time. COMPILER=inductor takes
# longer.
COMPILER := aot_eager
test-pipeline: setup ## a compiled pipeline of FSDP2 with a scaled loss, FSDP2 x TP x PP: one of two replicas is killed
	FTCOMM_TEST_PIPELINE=$(COMPILER) $(VENV)/bin/python -m pytest tests/torch/test_own_world.py -q -k pipeline $(ARGS)

# Not all of them run on each: those of trainers need the newest, and some do not depend on torch. A selection may be
# empty on one (pytest's exit code 5). All run though one has failed; what the page says is then what was found.
SUPPORTED := build/supported
SHOWN := $(VENV) $(LATEST) ray
supported: setup setup-latest setup-ray setup-torchtitan ## which trainers run under which launchers, into docs/supported.md (ARGS="-k slurm": those anew)
	@mkdir -p $(SUPPORTED)
	@shows() { $$1/bin/python -m pytest $$2 -q -m shows --junitxml=$(SUPPORTED)/$$3.xml $(ARGS) || test $$? -eq 5 || code=1; }; code=0; \
		export FTCOMM_TEST_PIPELINE=$(COMPILER); for v in $(VENV) $(LATEST); do shows $$v tests $$v; done; \
		export FTCOMM_TEST_RAY=1; shows $(LATEST) tests/ray ray; \
		$(VENV)/bin/python -m tests.supported $(if $(ARGS),--keep) --page docs/supported.md $(SHOWN:%=$(SUPPORTED)/%.xml) && exit $$code

bench: setup ## all-reduce beside gloo, then recovery after a kill
	$(VENV)/bin/ftcomm bench allreduce --ranks 2,4 --sizes 1K,1M,64M --compare gloo
	$(VENV)/bin/ftcomm bench recovery

# mkdocstrings reads the sources, by the tree of links that the types are checked in, and imports nothing.
SITE := build/site
docs: setup tree ## the documents as a site, in build/site; no warnings
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "==> $(SITE)/index.html"

dist: setup ## the sdist and the wheel in build/dist, the same bytes each time, and checked (ARGS="--url https://github.com/owner/name")
	@rm -rf build/dist
	$(VENV)/bin/python .ci/dist.py build/dist $(ARGS)
	$(VENV)/bin/twine check --strict build/dist/*

bench-micro: setup ## what the parts cost one by one, saved and compared with the last time
	$(VENV)/bin/python -m pytest tests/micro/bench_parts.py -q --benchmark-autosave --benchmark-compare \
		--benchmark-group-by=name --benchmark-columns=median,min,iqr,rounds $(ARGS)

setup: $(VENV)/.ready ## build .venv (PYTHON=... names the interpreter)

setup-latest: $(LATEST)/.ready ## build .venv-latest

compile-latest: $(LATEST)/.compiled

setup-ray: setup-latest ## add Ray to .venv-latest
	@$(LATEST)/bin/python -c "import ray.train" 2> /dev/null || $(LATEST)/bin/python -m pip install -q -e ".[ray]"

setup-torchtitan: setup-latest ## add torchtitan to .venv-latest
	@$(LATEST)/bin/python -c "import torchtitan" 2> /dev/null || $(LATEST)/bin/python -m pip install -q -e ".[titan]"
	@mkdir -p build

browser: ## Chromium, in which tests look at the live view (Debian, Ubuntu; as root)
	@mkdir -p build; for each in chromium chromedriver; do command -v $$each; done > build/browser.log 2>&1 || \
		{ apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver; } >> build/browser.log 2>&1 || \
		{ tail -n 3 build/browser.log; echo "==> no Chromium, so the tests of the live view in a browser are skipped: apt install chromium chromium-driver"; }

lint: setup ## ruff: rules and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: setup ## let ruff mend what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# mypy sees neither through the import hook of an editable install nor new files in the tree of a strict one, so the
# folders are linked here as the package that they make. The tree is rebuilt each time; mypy's cache is not.
TYPES := build/types
tree:
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/ftcomm
	@ln -s $(addprefix ../../../,$(wildcard ftcomm/*) bench control kernels) $(TYPES)/ftcomm/

STRICT := control kernels $(patsubst ftcomm/%/__init__.py,%,$(wildcard ftcomm/*/__init__.py))
types: setup tree ## mypy, strict, on all packages but bench
	cd $(TYPES) && "$(abspath $(VENV))/bin/mypy" --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
		-m ftcomm $(patsubst ftcomm/%.py,-m ftcomm.%,$(filter-out %/__init__.py,$(wildcard ftcomm/*.py))) $(STRICT:%=-p ftcomm.%)

clean: ## remove the environments and everything built
	rm -rf .venv .venv-latest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- environments -----------------------------------------------------------------------------------------------
# $(VENV)/.made says that the environment exists and for which folder, $(VENV)/.ready that everything is installed.
# An environment that was moved, or whose Python went away, looks whole and is not: it is made again.
$(foreach v,$(VENV) $(LATEST),$(shell test "$$(cat $(v)/.made 2>&1)" = "$(abspath $(v))" \
	&& $(v)/bin/python -c "" 2>/dev/null || rm -f $(v)/.made $(v)/.ready))

# The first of these that is a Python we support and can make environments; its path, or what is wrong.
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10 python3.14 python)
define FIND_PYTHON
for p in $(CANDIDATES); do \
	v=$$($$p -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
	case $$v in 3.10|3.11|3.12|3.13|3.14) ;; *) seen="$$seen\n  $$p is Python $$v"; continue ;; esac; \
	$$p -c 'import ensurepip, venv' 2>/dev/null && found=$$p && break; \
	seen="$$seen\n  $$p is Python $$v without venv and ensurepip (Debian, Ubuntu: apt install python$$v-venv)"; \
done; \
if [ -z "$$found" ]; then \
	printf "ftcomm needs Python 3.10 to 3.14 with venv. Looked for: $(CANDIDATES). Found:$${seen:- none of them}\n"; \
	echo "Install one, or name it: make setup PYTHON=/path/to/python3.12"; \
	exit 1; \
fi
endef

# pip writes its log. One line says how far it is: again and again on a terminal, once a phase elsewhere. To compile
# every module would take longer than all the rest; those that each rank imports are compiled by importing them. What
# setuptools notes of ftcomm is in the environment, so that two can be made at the same time.
define INSTALL
log=$(@D)/install.log; began=$$(date +%s); before=; \
printf '[egg_info]\negg_base = $(@D)\n' > $(@D)/build.cfg; export DIST_EXTRA_CONFIG="$(abspath $(@D))/build.cfg"; \
$(@D)/bin/python -m pip install --no-compile --disable-pip-version-check "$(WANTED)" -e ".[$(EXTRAS)]" > $$log 2>&1 & pip=$$!; \
trap "kill $$pip 2>/dev/null" EXIT; trap "exit 130" INT TERM; \
there() { ls -d $(@D)/lib/python3*/site-packages/*.dist-info 2>/dev/null | wc -l; }; \
while kill -0 $$pip 2>/dev/null; do \
	wanted=$$(sed -n 's/^Installing collected packages: //p' $$log | tr , '\n' | wc -l); \
	phase="installing packages: $$wanted" now="$$(there) are there"; \
	if [ $$wanted -eq 0 ]; then \
		phase="collecting packages" now=$$(sed -n 's/^ *Collecting \([^ ]*\).*/\1/p' $$log | tail -n 1); \
		now="$$(grep -c '^ *Collecting ' $$log) so far$${now:+, now $$now}"; \
	fi; \
	if [ -t 1 ]; then printf '\r\033[K%.79s' "==> $(@D): $$(($$(date +%s) - began)) s, $$phase, $$now"; \
	elif [ "$$phase" != "$$before" ]; then echo "==> $(@D): $$phase"; before=$$phase; fi; \
	sleep 0.5; \
done; \
if [ -t 1 ]; then printf '\r\033[K'; fi; \
wait $$pip || { cat $$log; echo "==> $(@D): the installation failed, as said above"; exit 1; }; \
$(@D)/bin/python -c "import torch._dynamo, torch.distributed.fsdp, ftcomm.cli" 2>> $$log || true; \
echo "==> $(@D): installed $$(there) packages in $$(($$(date +%s) - began)) s"
endef

# A new environment begins with what $(VENV) has, if it is of the same Python, as hard links: pip replaces files and
# writes into none. It then installs a quarter of the packages.
define BEGIN_WITH_THOSE
test -e $(@D)/install.log || test ! -e $(VENV)/.ready || test ! -d $(VENV)/$$(cd $(@D) && ls -d lib/python3*) || { \
	for each in bin etc include lib share; do \
		test ! -e $(VENV)/$$each || cp -aln $(VENV)/$$each $(@D)/ || exit 1; \
	done; \
	grep -rlI "^#!$(abspath $(VENV))/bin/" $(@D)/bin | xargs -r sed -i "1s,^#!$(abspath $(VENV))/,#!$(abspath $(@D))/,"; \
}
endef

%/.made:
	@$(FIND_PYTHON); \
	echo "==> $(@D): made with $$($$found --version)"; \
	$$found -m venv --clear $(@D)
	@echo "$(abspath $(@D))" > $@

# What tests import is compiled once, and not by each worker at the same moment: their asserts take pytest
# 0.1 s a file, and what pip left for later is more. What is wrong with a test says the run that follows.
SOURCES := $(shell find tests ftcomm control kernels bench -name "*.py")
ON_LATEST := -m "not protocol and not sweep"
$(LATEST)/.compiled: CHOSEN = $(ON_LATEST)
$(LATEST)/.compiled: ALSO := , transformers.trainer, lightning.pytorch
%/.compiled: %/.ready $(SOURCES)
	@echo "==> $(@D): compiling what tests import"
	@$(@D)/bin/python -c "import ftcomm$(ALSO)" > $(@D)/collect.log 2>&1 || true
	@$(@D)/bin/python -m pytest tests --collect-only -qq $(CHOSEN) >> $(@D)/collect.log 2>&1 || true
	@touch $@

$(VENV)/.ready: WANTED = $(TORCH)
$(LATEST)/.ready: WANTED = $(TORCH_LATEST)
$(LATEST)/.ready: EXTRAS := $(EXTRAS),torchft,hf,lightning
$(LATEST)/.ready: FIRST = $(BEGIN_WITH_THOSE)
%/.ready: %/.made pyproject.toml Makefile
	@echo "==> $(@D): installing $(WANTED) and ftcomm[$(EXTRAS)]; minutes the first time, once (log: $(@D)/install.log)"
	@$(FIRST)
	@$(INSTALL)
	@touch $@
