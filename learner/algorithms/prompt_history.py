"""Rewards that the prompts of a run had in its last steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mobula.learner.algorithms.advantages.inputs import EarlierRewards


class PromptHistory:
    """Rewards by prompt of the last `num_steps` steps, whichever weights sampled them. A prompt is a row of the data.

    A step is one call of `add`. What is older is forgotten, so the history has a bound however many prompts there are.
    """

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[Mapping[str, list[float]]] = deque(maxlen=num_steps)

    def of(self, prompts: Sequence[str]) -> EarlierRewards:
        """Earlier rewards of the prompts of a step; `prompts[k]` is number k there."""
        found = [
            (value, n) for n, prompt in enumerate(prompts) for step in self._steps for value in step.get(prompt, [])
        ]
        values, ids = zip(*found, strict=True) if found else ((), ())
        return EarlierRewards(torch.tensor(values, dtype=torch.float64), torch.tensor(ids, dtype=torch.int64))

    def add(self, prompts: Sequence[str], rewards: Sequence[float]) -> None:
        """The step is over: these are its rewards, each with its prompt."""
        step: dict[str, list[float]] = {}
        for prompt, reward in zip(prompts, rewards, strict=True):
            step.setdefault(prompt, []).append(reward)
        self._steps.append(step)

    def state(self) -> list[dict[str, list[float]]]:
        """JSON; numbers come back as they were."""
        return [dict(step) for step in self._steps]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        self._steps.clear()
        self._steps.extend(state)
