"""Small configurations, prompts and groups that the learner's tests share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaHandle, ProcessedMedia
from mobula.cluster.records.trajectory import (
    FinishReason,
    MediaSpan,
    Prompt,
    Response,
    Reward,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig

PATCH_VALUES = 3 * 2 * 14 * 14


def tiny_config(model: Path, *overrides: str) -> RunConfig:
    """A run of the tiny model at temperature 0.8, one learner process unless overridden."""
    words = ["experiment=digits", f"policy.model={model}", "learner=single", "resources.learner.num_workers=1"]
    words += ["sampler.temperature=0.8", "learner.learning_rate=0.001", "algorithm.kl.coef=0"]
    return load_config(overridden(words, overrides))


def add_dropout(folder: Path) -> Path:
    """Give the checkpoint there attention with dropout, which `policy.attention=eager` computes in training."""
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part["attention_dropout"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def image(seed: int, rows: int = 4, columns: int = 4) -> MediaHandle:
    """A random image of rows x columns patches; it takes rows * columns / 4 tokens."""
    pixels = np.random.default_rng(seed).normal(size=(rows * columns, PATCH_VALUES)).astype(np.float32)
    grid = np.array([[1, rows, columns]], dtype=np.int64)
    media = ProcessedMedia("image", {"pixel_values": pixels, "image_grid_thw": grid})
    return MediaHandle(f"image-{seed}-{rows}x{columns}", "image", media.num_bytes, media, f"image-{seed}.png")


def prompt(tokenizer, prompt_id: str, images: Sequence[MediaHandle] = (), text: str = "Which digit is this?") -> Prompt:
    """A prompt in the chat layout of the tiny model, images first."""
    special = tokenizer.convert_tokens_to_ids
    ids = [special("<|im_start|>"), *tokenizer.encode("user\n")]
    spans = []
    for handle in images:
        num_tokens = int(handle.reference.inputs["image_grid_thw"].prod()) // 4
        ids.append(special("<|vision_start|>"))
        spans.append(MediaSpan(len(ids), len(ids) + num_tokens))
        ids += [special("<|image_pad|>")] * num_tokens + [special("<|vision_end|>")]
    ids += [*tokenizer.encode(text), special("<|im_end|>")]
    tokens = np.array(ids, dtype=np.int32)
    return Prompt(prompt_id, prompt_id, text, tokens, tokens, tuple(images), tuple(spans))


def group(
    of: Prompt, responses: Sequence[Sequence[int]], rewards: Sequence[float | None], seed: int = 0
) -> ScoredGroup:
    """A scored group whose behaviour log-probs are arbitrary; `with_logprobs` sets real ones. Tests change the content,
    so its summary has no digest.
    """
    rng = np.random.default_rng(seed)
    trajectories = tuple(
        Trajectory(
            trajectory_id=f"{of.prompt_id}#{n}",
            actions=TokenActions(np.array(ids, dtype=np.int32)),
            behavior_logprobs=rng.normal(-5.0, 0.1, size=len(ids)).astype(np.float32),
            action_mask=np.ones(len(ids), dtype=bool),
            weight_spans=(WeightSpan(0, 0, len(ids)),),
            finish_reason=FinishReason.STOP,
            response=Response("", len(ids), False),
        )
        for n, ids in enumerate(responses)
    )
    made = TrajectoryGroup(of, trajectories)
    summary = dataclasses.replace(made.summary(), sha256="")
    return ScoredGroup(summary, made, tuple(None if r is None else Reward(r) for r in rewards))


def edited(scored: ScoredGroup, **columns: Sequence[Any]) -> ScoredGroup:
    """The group with other fields of its trajectories; each of `columns` has one value for every sibling."""
    siblings = zip(scored.group.trajectories, *columns.values(), strict=True)
    rows = tuple(dataclasses.replace(t, **dict(zip(columns, fields, strict=True))) for t, *fields in siblings)
    return dataclasses.replace(scored, group=dataclasses.replace(scored.group, trajectories=rows))


def changed(scored: ScoredGroup, sibling: int, **fields: Any) -> ScoredGroup:
    """The group with other fields of one trajectory."""
    rows = list(scored.group.trajectories)
    rows[sibling] = dataclasses.replace(rows[sibling], **fields)
    return dataclasses.replace(scored, group=dataclasses.replace(scored.group, trajectories=tuple(rows)))


def cut_off(scored: ScoredGroup, sibling: int = 0) -> ScoredGroup:
    """The group, one of whose responses hit the length limit."""
    return changed(scored, sibling, finish_reason=FinishReason.LENGTH)


def with_logprobs(scored: ScoredGroup, logprobs: Sequence[np.ndarray]) -> ScoredGroup:
    """The same group as if an engine had sampled it with these log-probs."""
    return edited(scored, behavior_logprobs=logprobs)


def with_reference(scored: ScoredGroup, gap: float = 0.0) -> ScoredGroup:
    """The group with log-probs of a reference, which are lower by `gap`."""
    rows = [t.behavior_logprobs - np.float32(gap) for t in scored.group.trajectories]
    return dataclasses.replace(scored, reference_logprobs=rows)


def random_groups(tokenizer, num_groups: int, num_siblings: int, seed: int = 0, longest: int = 8) -> list[ScoredGroup]:
    """Groups with no, one and two images in turn, responses of different lengths, rewards of 0 and 1."""
    rng = np.random.default_rng(seed)
    sets = [[], [image(seed + 1)], [image(seed + 2, 2, 4), image(seed + 3, 6, 4)]]
    groups = []
    for n in range(num_groups):
        asked = prompt(tokenizer, f"0/{n}/row-{n}", sets[n % 3])
        responses = [rng.integers(0, 250, size=rng.integers(1, longest + 1)).tolist() for _ in range(num_siblings)]
        groups.append(group(asked, responses, rng.integers(0, 2, size=num_siblings).astype(float).tolist(), seed + n))
    return groups
