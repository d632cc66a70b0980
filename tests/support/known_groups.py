"""Groups whose prompts can be made again from their ids, and a real learner in this process to train on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from mobula.cluster.errors import MediaError
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner


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
        return {name: tensor.clone() for name, tensor in self.rank._named_weights()}


def numbered(groups: Sequence[ScoredGroup], first: int) -> list[ScoredGroup]:
    """The groups as those of places `first`, ... of the sequence, with reference log-probs."""
    return [_numbered(group, f"0/{first + n}/row") for n, group in enumerate(groups)]


def _numbered(scored: ScoredGroup, prompt_id: str) -> ScoredGroup:
    group = dataclasses.replace(scored.group, prompt=dataclasses.replace(scored.group.prompt, prompt_id=prompt_id))
    rng = np.random.default_rng(0)
    logprobs = [rng.normal(-5, 0.1, t.num_steps).astype(np.float32) for t in group.trajectories]
    return dataclasses.replace(scored, group=group, summary=group.summary(), reference_logprobs=logprobs)
