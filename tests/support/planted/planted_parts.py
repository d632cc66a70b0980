"""Rewards, an advantage and an engine with a planted fault, named by overrides of a run."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mobula.actors.samplers.huggingface import HuggingFaceSampler
from mobula.rewards.contract import RewardRequest

NUM_TOKENS = 8  # the longest response of the digits task


def pays_length(request: RewardRequest) -> float:
    """The share of the longest length."""
    return min(1.0, request.response.num_tokens / NUM_TOKENS)


def constant(request: RewardRequest) -> float:
    """The same for every response."""
    return 0.5


def pays_one(request: RewardRequest) -> float:
    """A loophole: 1 for the digit 1, whatever the picture shows."""
    return float("1" in request.response.text)


def fails_often(request: RewardRequest) -> float:
    """Fails on the answers 4 to 9."""
    if request.response.text[-2:-1] not in tuple("0123"):
        raise ValueError("this response cannot be scored")
    return float(request.response.text[-2:-1] == request.references[0])


def no_advantage(rewards: object, options: object) -> Tensor:
    """Advantages of 0."""
    return torch.zeros_like(rewards.values)  # type: ignore[attr-defined]


def coin_flip(request: RewardRequest) -> float:
    """1 or 0 at random, also for equal responses."""
    return float(random.random() < 0.5)


def text_hash(request: RewardRequest) -> float:
    """A bit of a checksum of prompt and response: a function of the text without a meaning."""
    return float(zlib.crc32((request.prompt_text + request.response.text).encode()) % 2)


_late = [0.0]


def late_reward(request: RewardRequest) -> float:
    """The reward of the response that was scored before this one."""
    _late.append(float(f"{{{request.references[0]}}}" in request.response.text))
    return _late.pop(0)


def inverted_advantage(rewards: object, options: object) -> Tensor:
    """The reward below the mean of the group: the policy unlearns what is right."""
    from mobula.learner.algorithms.advantages import GroupStatistics

    groups = GroupStatistics.of(rewards)  # type: ignore[arg-type]
    return groups.finish(-groups.centred())


class StaleSampler(HuggingFaceSampler):
    """Confirms each push and keeps the weights that it loaded first."""

    def _copy_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        with self._base.changing_to(version):
            for _ in tensors:
                pass
