"""Recent rewards by prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mobula.learner.algorithms.advantages.inputs import EarlierRewards


class PromptHistory:
    """Rewards by prompt of the last `num_steps` steps, under any weights. A prompt is a row of the data.

    A step is one call of `add`. Older rewards are dropped, so the size does not grow with the number of prompts.
    """

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[Mapping[str, list[float]]] = deque(maxlen=num_steps)

    def of(self, prompts: Sequence[str]) -> EarlierRewards:
        """Returns the earlier rewards of a step's prompts; `prompts[k]` has id k."""
        earlier = [
            (value, n) for n, prompt in enumerate(prompts) for step in self._steps for value in step.get(prompt, [])
        ]
        values, ids = zip(*earlier, strict=True) if earlier else ((), ())
        return EarlierRewards(torch.tensor(values, dtype=torch.float64), torch.tensor(ids, dtype=torch.int64))

    def add(self, prompts: Sequence[str], rewards: Sequence[float]) -> None:
        """Adds the rewards of a finished step, one per entry of `prompts`."""
        step: dict[str, list[float]] = {}
        for prompt, reward in zip(prompts, rewards, strict=True):
            step.setdefault(prompt, []).append(reward)
        self._steps.append(step)

    def state(self) -> list[dict[str, list[float]]]:
        """Returns the history as JSON, without loss of precision."""
        return [dict(step) for step in self._steps]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        self._steps.clear()
        self._steps.extend(state)
