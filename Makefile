# Two commands do everything on a fresh machine: `make train` and `make test`. `make train-pretrained` trains a released
# model instead of one with random weights.
# More words for any of them go into ARGS: make train ARGS="seed=1 algorithm.max_staleness=1"
# A word of ARGS takes the place of the one that `make train` would give: make train ARGS="experiment=digit_sum"

NUM_GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
preset = $(if $(filter 0,$(NUM_GPUS)),$(1),$(if $(filter 1,$(NUM_GPUS)),gpu_1,two_gpu))
NOW := $(shell date +%Y%m%d-%H%M%S)
ARGS ?=
unless = $(if $(filter $(1)=%,$(ARGS)),,$(1)=$(2))

.PHONY: environment harness verifiers tinker-cookbook peers train train-pretrained test test-all types pages benchmark clean

environment:
	@./deploy/environment.sh

harness:
	@./deploy/environment.sh lmms-eval

verifiers:
	@./deploy/environment.sh verifiers

tinker-cookbook:
	@./deploy/environment.sh tinker-cookbook

peers: environment
	@for peer in $(patsubst benchmarks/peers/%.txt,%,$(wildcard benchmarks/peers/*.txt)); do \
	    ./deploy/environment.sh peer $$peer || exit 1; done

train: PRESET ?= $(call preset,laptop)
train: NAME ?= digits-$(NOW)
train: environment
	.venv/bin/mobula train $(call unless,experiment,digits) $(call unless,resources,$(PRESET)) \
	    $(call unless,name,$(NAME)) $(ARGS)

# One engine and one learner: two of each, as `laptop` has, do not fit into 16 GiB.
train-pretrained: PRESET ?= $(call preset,laptop_in_turns)
train-pretrained: BACKEND = $(if $(filter laptop_in_turns gpu_1 two_gpu,$(PRESET)),$(call unless,learner,single))
train-pretrained: NAME ?= sums-$(NOW)
train-pretrained: environment
	.venv/bin/mobula train $(call unless,experiment,sums) $(call unless,resources,$(PRESET)) $(BACKEND) \
	    $(call unless,name,$(NAME)) $(ARGS)

# What a change most likely breaks: everything short, and one job of each capability (marker `core`).
PYTEST = .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
OUT = load or families or matrix or exhaustive
QUICK = core and not exhaustive or not (slow or $(OUT))
test: environment
	$(PYTEST) -m "$(QUICK)" $(ARGS)

# The rest, by lane: make test-all LANE=matrix; or by share: SHARE=2 SPLITS=8 runs the second eighth.
LANE ?= all
SHARE ?=
SPLITS ?= 8
lane_all = not ($(QUICK))
lane_slow = (slow or families) and not (core or load or matrix or exhaustive)
lane_families = families
lane_matrix = matrix
lane_load = load
lane_exhaustive = exhaustive and not (families or load or matrix)
test-all: environment
	$(if $(lane_$(LANE)),,$(error LANE=$(LANE) is no lane: all, slow, families, matrix, load, exhaustive))
	$(PYTEST) -m "$(lane_$(LANE))" $(if $(SHARE),--splits $(SPLITS) --group $(SHARE)) $(ARGS)

# mypy and editors follow no `__path__`, so they find the directories of `mobula` by links.
types: environment
	@mkdir -p build/types/mobula
	@ln -sfn $(CURDIR)/deploy/package/mobula/__init__.py build/types/mobula/__init__.py
	@for name in actors cluster configs deploy examples learner rewards; do ln -sfn $(CURDIR)/$$name build/types/mobula/; done
	.venv/bin/mypy $(ARGS)

# The pages that are written from the code; tests compare them.
PAGES = configuration metric_tables error_messages support_tables checked_machines measured scaling_guide
pages: environment
	@for page in $(PAGES); do .venv/bin/python -m docs.generate.$$page || exit 1; done

benchmark: environment
	.venv/bin/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv .venv-uv .venv-lmms-eval .venv-verifiers .venv-tinker-cookbook .venv-peers build *.egg-info
