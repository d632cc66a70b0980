"""ReasoningGym: a task of reasoning-gym, with one question, one answer, and the task's score."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import reasoning_gym

from mobula.actors.environments.base import Action, EnvironmentSpec, Message, Reset, Step

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """`task` is a dataset of reasoning-gym with arguments `config`; every seed is another problem.

    The answer is the text in the last `<answer>...</answer>`; a response without it scores 0.

    Source: reasoning-gym 0.1.25, `create_dataset` and `score_answer`.
    """

    spec = EnvironmentSpec(max_turns=1)

    def __init__(self, *, task: str, instruction: str, config: Mapping[str, Any] | None = None) -> None:
        self._task = task
        self._instruction = instruction
        self._config = dict(config or {})
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}
        try:
            reasoning_gym.create_dataset(task, seed=0, size=1, **self._config)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"options.task={task!r} with options.config={self._config}: {error}") from error

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._dataset = reasoning_gym.create_dataset(self._task, seed=seed, size=1, **self._config)
        self._entry = self._dataset[0]
        answer = str(self._entry["answer"])
        text = f"{self._entry['question']}\n{self._instruction}"
        return Reset((Message("user", text),), {"answer": answer, "solution": f"<answer>{answer}</answer>"})

    def step(self, action: Action) -> Step:
        answers = ANSWER.findall(action.text)
        score = self._dataset.score_answer(answers[-1].strip(), self._entry) if answers else 0.0
        return Step((), float(score), True, False, {})

    def close(self) -> None:
        """Does nothing."""
