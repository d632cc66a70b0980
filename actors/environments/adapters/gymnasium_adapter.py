"""Any environment of Gymnasium that renders pixels or observes them, with named discrete actions."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete

from mobula.actors.environments.base import Action, EnvironmentSpec, Message, Reset, Step, encoded


class GymnasiumEnvironment:
    """The frame is the observation, and a turn is the name of one action; the last name in the text counts.

    `actions` names the discrete actions in order. A turn without a name costs `invalid_reward` and a turn, and leaves
    the environment as it is. `module` is imported first, for libraries that register their environments (`minigrid`).

    Source: Gymnasium 1.4, gymnasium.farama.org/api/env.
    """

    def __init__(
        self,
        *,
        id: str,
        actions: Sequence[str],
        instruction: str,
        max_turns: int,
        invalid_reward: float = 0.0,
        module: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if module:
            importlib.import_module(module)
        self._environment = gymnasium.make(id, render_mode="rgb_array", **(arguments or {}))
        space = self._environment.action_space
        if not isinstance(space, Discrete):
            raise ValueError(f"{id} has actions of {space}: only Discrete actions can be named")
        if len(actions) > space.n or not actions:
            raise ValueError(f"{id} has {space.n} actions, options.actions names {len(actions)}: name them in order")
        self._actions = {name.lower(): int(space.start) + number for number, name in enumerate(actions)}
        if len(self._actions) != len(actions):
            raise ValueError(f"options.actions={list(actions)} has a name twice: give each action its own")
        names = "|".join(re.escape(name) for name in sorted(self._actions, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<!\w)(?:{names})(?!\w)", re.IGNORECASE)
        self._instruction = instruction
        self._invalid_reward = invalid_reward
        self.spec = EnvironmentSpec(max_turns=max_turns)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._environment.reset(seed=seed, options=dict(options) or None)
        text = f"<image>{self._instruction} Actions: {', '.join(self._actions)}."
        return Reset((Message("user", text, (self._frame(),)),), {})

    def step(self, action: Action) -> Step:
        names = self._pattern.findall(action.text)
        if not names:
            message = Message("user", f"No action found. Actions: {', '.join(self._actions)}.")
            return Step((message,), self._invalid_reward, False, False, {"is_valid": False})
        _, reward, terminated, truncated, _ = self._environment.step(self._actions[names[-1].lower()])
        message = Message("user", "<image>", (self._frame(),))
        return Step((message,), float(reward), bool(terminated), bool(truncated), {"is_valid": True})

    def close(self) -> None:
        self._environment.close()

    def _frame(self) -> bytes:
        frame = np.asarray(self._environment.render())
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"render() gave {frame.dtype} {frame.shape}: rgb_array is uint8 [H, W, 3]")
        return encoded(frame)
