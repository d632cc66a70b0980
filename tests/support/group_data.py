"""Groups with an image, and groups whose prompts can be made again from their ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from one_learner import copied

from mobula.cluster.errors import MediaError
from mobula.cluster.records.media import MediaHandle
from mobula.cluster.records.trajectory import MediaSpan, Prompt, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import UpdateReport
from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner


def image_prompt() -> Prompt:
    """Prompt 0/3/row-3 with one image of two tokens."""
    return Prompt(
        prompt_id="0/3/row-3",
        sample_id="row-3",
        text="which digit?",
        compact_ids=np.array([5, 99, 6], dtype=np.int32),
        expanded_ids=np.array([5, 99, 99, 6], dtype=np.int32),
        media=(MediaHandle("k" * 64, "image", 1234, object(), "images/3.png"),),
        media_spans=(MediaSpan(1, 3),),
        references=("7", "seven"),
        metadata={"level": 2},
    )


def assert_equal(read: TrajectoryGroup, written: TrajectoryGroup) -> None:
    """Every field, and every array's type and values."""
    ours, theirs = read.prompt, written.prompt
    for name in ("prompt_id", "sample_id", "text", "media", "media_spans", "references", "metadata"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [m.source for m in ours.media] == [m.source for m in theirs.media]
    pairs = [(ours.compact_ids, theirs.compact_ids), (ours.expanded_ids, theirs.expanded_ids)]
    for a, b in zip(read.trajectories, written.trajectories, strict=True):
        for name in ("trajectory_id", "weight_spans", "finish_reason", "response"):
            assert getattr(a, name) == getattr(b, name), name
        pairs += [
            (a.actions.token_ids, b.actions.token_ids),
            (a.behavior_logprobs, b.behavior_logprobs),
            (a.action_mask, b.action_mask),
        ]
    for array, expected in pairs:
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


class KnownPrompts:
    """The prompts of some groups, each at the place that its id names; `broken` rows are unusable."""

    def __init__(self, groups: Iterable[ScoredGroup] = (), broken: Sequence[str] = ()) -> None:
        self._prompts = {group.summary.group_id: group.group.prompt for group in groups}
        self._broken = broken

    def index_of(self, prompt_id: str) -> int:
        return int(prompt_id.split("/")[1])

    def prompt_at(self, index: int) -> Prompt:
        prompt_id = next(i for i in self._prompts if self.index_of(i) == index)
        if prompt_id in self._broken:
            raise MediaError(f"{prompt_id} is corrupt")
        return self._prompts[prompt_id]


class OneRank:
    """A real learner in this process, as the loop calls it."""

    def __init__(self, config: RunConfig) -> None:
        self.rank = Learner(config, 0, 1, (250, 251))
        self.rank.connect("")

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        return self.rank.update(groups, self.rank.version + 1)

    def weights(self) -> dict[str, torch.Tensor]:
        return copied(self.rank)

    async def save(self, folder: Path) -> None:
        self.rank.save(folder)

    async def finish_save(self) -> bool:
        self.rank.finish_save()
        return True

    async def load(self, folder: Path) -> int:
        return self.rank.load(folder)


def numbered(groups: Sequence[ScoredGroup], first: int) -> list[ScoredGroup]:
    """The groups as those of places `first`, ... of the sequence, with reference log-probs."""
    return [_numbered(group, f"0/{first + n}/row") for n, group in enumerate(groups)]


def _numbered(scored: ScoredGroup, prompt_id: str) -> ScoredGroup:
    group = dataclasses.replace(scored.group, prompt=dataclasses.replace(scored.group.prompt, prompt_id=prompt_id))
    rng = np.random.default_rng(0)
    logprobs = [rng.normal(-5, 0.1, t.num_steps).astype(np.float32) for t in group.trajectories]
    return dataclasses.replace(scored, group=group, summary=group.summary(), reference_logprobs=logprobs)
