"""Captured trajectories of `mobula serve-policy` as rows for `forward_backward`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tinker.types as tk

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import Trajectory, TrajectoryGroup
from mobula.cluster.replay.trajectory_log import TrajectoryLog

READ_S = 60.0


def captured_rows(folder: Path, *, steps: range | None = None) -> Iterator[tk.Datum]:
    """Yields a row for each trajectory below `folder`, for the losses importance_sampling, ppo and cispo.

    The advantage of a sampled token is the trajectory's reward less the mean of its group; tokens of the program have
    advantage 0. The log-probs are those of the engine, so the losses correct for the weights that have changed since.
    Tokens that the engine never samples (placeholders of media) have no probability in them. Groups whose rewards are
    all equal are left out.

    Args:
        folder: the folder of `--capture`.
        steps: files to read, by their numbers; None reads all.

    Raises:
        ValueError: a trajectory has images, which are not kept.
    """
    log = TrajectoryLog(folder / "trajectories", timeout_s=READ_S)
    for step in log.steps():
        if steps is not None and step not in steps:
            continue
        for recorded in log.read(step):
            scored = [
                (trajectory, reward.value)
                for trajectory, reward in zip(recorded.group.trajectories, recorded.rewards, strict=True)
                if reward is not None
            ]
            mean = float(np.mean([value for _, value in scored])) if scored else 0.0
            if any(value != mean for _, value in scored):
                for trajectory, value in scored:
                    yield _row(recorded.group, trajectory, value - mean)


def _row(group: TrajectoryGroup, trajectory: Trajectory, advantage: float) -> tk.Datum:
    """Position i of the row predicts token i + 1 of prompt and actions."""
    assert isinstance(trajectory.actions, TokenActions), "serve-policy samples tokens"
    if group.prompt.media or trajectory.actions.media:
        raise ValueError(f"{trajectory.trajectory_id} has images: send their files in ModelInput chunks instead")
    prompt, sampled = group.prompt.expanded_ids, trajectory.actions.token_ids
    tokens = np.concatenate([prompt, sampled])
    before = np.zeros(len(prompt) - 1, dtype=np.float32)
    mask = trajectory.action_mask.astype(np.float32)
    values = {
        "logprobs": np.concatenate([before, trajectory.behavior_logprobs * mask]).astype(np.float32),
        "advantages": np.concatenate([before, advantage * mask]).astype(np.float32),
    }
    return tk.Datum(
        model_input=tk.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:].astype(np.int64), **values},
    )
