# Two commands do everything on a fresh machine: `make train` and `make test`.
# More words for either go into ARGS: make train ARGS="seed=1 algorithm.max_staleness=1"
# A word of ARGS takes the place of the one that `make train` would give: make train ARGS="experiment=digit_sum"

NUM_GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
PRESET ?= $(if $(filter 0,$(NUM_GPUS)),laptop,$(if $(filter 1,$(NUM_GPUS)),gpu_1,two_gpu))
NAME ?= digits-$(shell date +%Y%m%d-%H%M%S)
ARGS ?=
unless = $(if $(filter $(1)=%,$(ARGS)),,$(1)=$(2))

.PHONY: environment harness verifiers train test benchmark clean

environment:
	@./deploy/environment.sh

harness:
	@./deploy/environment.sh lmms-eval

verifiers:
	@./deploy/environment.sh verifiers

train: environment
	.venv/bin/mobula train $(call unless,experiment,digits) $(call unless,resources,$(PRESET)) \
	    $(call unless,name,$(NAME)) $(ARGS)

test: environment
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

benchmark: environment
	.venv/bin/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv .venv-uv .venv-lmms-eval .venv-verifiers build *.egg-info
