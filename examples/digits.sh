#!/usr/bin/env bash
# Train the small model on handwritten digits: needs no weights and no data from elsewhere; minutes on two CPU cores.
# Run in the root of the repository: `examples/digits.sh`. Arguments are added to the words below and must not repeat them.
set -euo pipefail

words=(
    experiment=digits       # configs/experiment/digits.yaml: model, data, warm start and sizes
    resources=laptop        # two learner ranks and two rollout actors on the CPU; gpu_1 or two_gpu with GPUs
    name=example-digits     # results go to runs/example-digits: report.html, summary.json, checkpoints
    num_steps=20            # RL steps; the experiment's own number is 200
    resume=auto             # a second call goes on from the newest complete checkpoint
)

exec "${MOBULA:-.venv/bin/mobula}" train "${words[@]}" "$@"
