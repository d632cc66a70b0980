"""Trajectories of denoising steps, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mobula.cluster.records.actions import LatentActions, to_bfloat16
from mobula.cluster.records.media import MediaHandle, ProcessedMedia
from mobula.cluster.records.partial_response import SampledSequence
from mobula.cluster.records.trajectory import (
    FinishReason,
    MediaSpan,
    Prompt,
    Response,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)

SIGMAS = np.array([1.0, 0.9, 0.6, 0.2, 0.0], dtype=np.float32)
NO_IDS = np.empty(0, dtype=np.int32)


def latent_actions(seed: int, *, first: int = 0, num_steps: int = 3, dtype: type = np.float32) -> LatentActions:
    """Random latents [T + 1, 4, 2, 2] of a window of the schedule `SIGMAS`; of uint16, the bits of bfloat16."""
    numbers = np.random.default_rng(seed).normal(size=(num_steps + 1, 4, 2, 2))
    latents = to_bfloat16(numbers) if dtype is np.uint16 else numbers.astype(dtype)
    index = np.arange(first, first + num_steps, dtype=np.int32)
    return LatentActions(latents, index, 1000 * SIGMAS[index], SIGMAS)


def sampled(actions: LatentActions) -> SampledSequence:
    """A finished response of these steps with an image."""
    spans = (WeightSpan(2, 0, actions.num_steps),)
    logprobs = -np.arange(actions.num_steps, dtype=np.float32)
    return SampledSequence(actions, logprobs, spans, FinishReason.STOP, (b"png",))


def condition(name: str) -> MediaHandle:
    """An encoded prompt: one row of each argument."""
    rng = np.random.default_rng(len(name))
    inputs = {"encoder_hidden_states": rng.normal(size=(1, 3, 8)).astype(np.float32)}
    medium = ProcessedMedia("condition", inputs)
    return MediaHandle(f"condition-{name}", "condition", medium.num_bytes, medium, name)


def latent_prompt(text: str, negative: str | None = None) -> Prompt:
    """A prompt without tokens whose text is encoded, and with `negative` that of another text."""
    media = tuple(condition(t) for t in (text, negative) if t is not None)
    spans = (MediaSpan(0, 0),) * len(media)
    return Prompt(f"0/0/{text}", text, text, NO_IDS, NO_IDS, media, spans, metadata={"target": text})


def latent_group(prompt: Prompt, siblings: Sequence[LatentActions]) -> TrajectoryGroup:
    """Siblings with an image each."""
    return TrajectoryGroup(
        prompt,
        tuple(
            Trajectory(
                trajectory_id=f"{prompt.prompt_id}#{n}",
                actions=actions,
                behavior_logprobs=-np.arange(actions.num_steps, dtype=np.float32),
                action_mask=np.ones(actions.num_steps, dtype=bool),
                weight_spans=(WeightSpan(0, 0, actions.num_steps),),
                finish_reason=FinishReason.STOP,
                response=Response("", actions.num_steps, is_truncated=False, images=(b"png",)),
            )
            for n, actions in enumerate(siblings)
        ),
    )


def assert_same_actions(read: LatentActions, written: LatentActions) -> None:
    """Every array's type, shape and values."""
    for name in ("latents", "step_index", "timesteps", "sigmas"):
        array, expected = getattr(read, name), getattr(written, name)
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        np.testing.assert_array_equal(array, expected)
