#!/usr/bin/env bash
# The same task with asynchronous rollouts: responses may be one weight version old when they are trained on.
# Run in the root of the repository: `examples/asynchronous.sh`.
set -euo pipefail

words=(
    experiment=digits
    resources=laptop
    name=example-asynchronous
    num_steps=20
    algorithm.max_staleness=1             # 0 is synchronous on-policy training; 1 samples while the learner updates
    algorithm=cispo                       # configs/algorithm/cispo.yaml: every token keeps its gradient, by a clipped ratio
    replay.trajectory_log=true            # record what is trained on; `mobula replay` and `mobula score` read it
    resume=auto
)

exec "${MOBULA:-.venv/bin/mobula}" train "${words[@]}" "$@"
