"""Captured trajectories of `mobula serve-policy` as rows for `forward_backward`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tinker.types as tk

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaHandle, MediaSpan
from mobula.cluster.records.trajectory import Prompt, Trajectory, TrajectoryGroup
from mobula.cluster.replay.trajectory_log import IMAGES_FOLDER, TrajectoryLog

JPEG = b"\xff\xd8\xff"
READ_S = 60.0


def captured_rows(folder: Path, *, steps: range | None = None) -> Iterator[tk.Datum]:
    """Yields a row for each trajectory below `folder`, for the losses importance_sampling, ppo and cispo.

    The advantage of a sampled token is the trajectory's reward less the mean of its group; tokens of the program have
    advantage 0. The log-probs are those of the engine, so the losses correct for the weights that have changed since.
    Tokens that the engine never samples (placeholders of media) have no probability in them. Images are sent as files;
    their placeholders have a target each. Groups whose rewards are all equal are left out.

    Args:
        folder: the folder of `--capture`.
        steps: files to read, by their numbers; None reads all.

    Raises:
        ValueError: a trajectory has media other than images, or an image file is missing.
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
                    yield _row(recorded.group, trajectory, value - mean, folder / IMAGES_FOLDER)


def _row(group: TrajectoryGroup, trajectory: Trajectory, advantage: float, images: Path) -> tk.Datum:
    """Position i of the row predicts token i + 1 of prompt and actions."""
    assert isinstance(trajectory.actions, TokenActions), "serve-policy samples tokens"
    prompt, sampled = group.prompt.expanded_ids, trajectory.actions.token_ids
    tokens = np.concatenate([prompt, sampled])
    before = np.zeros(len(prompt) - 1, dtype=np.float32)
    mask = trajectory.action_mask.astype(np.float32)
    values = {
        "logprobs": np.concatenate([before, trajectory.behavior_logprobs * mask]).astype(np.float32),
        "advantages": np.concatenate([before, advantage * mask]).astype(np.float32),
    }
    return tk.Datum(
        model_input=tk.ModelInput(chunks=list(_chunks(tokens[:-1], group.prompt, trajectory.actions, images))),
        loss_fn_inputs={"target_tokens": tokens[1:].astype(np.int64), **values},
    )


def _chunks(tokens: np.ndarray, prompt: Prompt, actions: TokenActions, images: Path) -> Iterator[tk.ModelInputChunk]:
    later = (MediaSpan(s.start + prompt.num_tokens, s.end + prompt.num_tokens) for s in actions.media_spans)
    at = 0
    for handle, span in zip((*prompt.media, *actions.media), (*prompt.media_spans, *later), strict=True):
        yield tk.EncodedTextChunk(tokens=tokens[at : span.start].tolist())
        yield _image(handle, span.end - span.start, images)
        at = span.end
    yield tk.EncodedTextChunk(tokens=tokens[at:].tolist())


def _image(handle: MediaHandle, num_tokens: int, images: Path) -> tk.ImageChunk:
    if handle.modality != "image":
        raise ValueError(f"{handle.source} is a {handle.modality}, and a ModelInput takes text and images alone")
    file = images / handle.key
    if not file.is_file():
        raise ValueError(f"{file} is missing, the file of {handle.source}: capture the sessions again")
    content = file.read_bytes()
    is_jpeg = content.startswith(JPEG)
    return tk.ImageChunk(data=content, format="jpeg" if is_jpeg else "png", expected_tokens=num_tokens)
