#!/usr/bin/env bash
# Train a released vision-language checkpoint on your own data, with two GPUs.
# MODEL is a checkpoint's folder or hub name, DATA a folder with train.jsonl, validation.jsonl and test.jsonl as
# docs/data.md describes it.
# Run in the root of the repository: `MODEL=... DATA=... examples/own_model.sh`. Not run on a GPU so far.
set -euo pipefail

words=(
    experiment=own                        # values for a released checkpoint: no warm start, long answers
    "policy.model=${MODEL:?set MODEL to the folder or hub name of a checkpoint}"
    "data.path=${DATA:?set DATA to the folder of a data set}"
    "resources=${RESOURCES:-two_gpu}"       # RESOURCES=laptop runs a small checkpoint on the CPU
    rewards=math_answer                   # the answer in \boxed{} is compared with the reference
    name=example-own
    num_steps=100
    algorithm.samples_per_prompt=8        # responses in a group
    algorithm.prompts_per_step=16         # groups in a step
    learner.learning_rate=1.0e-6
    resume=auto
)

exec "${MOBULA:-.venv/bin/mobula}" train "${words[@]}" "$@"
