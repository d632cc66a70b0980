"""An environment that shows an image in every turn, and whose steps take as long as its reset was asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from mobula.actors.environments.base import Action, EnvironmentSpec, Message, Reset, Step, encoded


class SlowImages:
    """`num_turns` turns, each answered with an image of its own; `step_s` is an option of a reset."""

    def __init__(self, *, num_turns: int) -> None:
        self.spec = EnvironmentSpec(max_turns=num_turns)
        self._num_turns = num_turns
        self._turn, self._step_s = 0, 0.0

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._turn, self._step_s = 0, options.get("step_s", 0.0)
        return Reset((Message("user", f"<image>Episode {seed}: go on.", (self._image(),)),), {})

    def step(self, action: Action) -> Step:
        time.sleep(self._step_s)
        self._turn += 1
        is_over = self._turn == self._num_turns
        return Step((Message("user", "<image>", (self._image(),)),), 1.0, is_over, False, {})

    def close(self) -> None:
        """Nothing is held."""

    def _image(self) -> bytes:
        pixels = np.full((2, 2, 3), 20 * self._turn, dtype=np.uint8)
        return encoded(pixels, scale=28)
