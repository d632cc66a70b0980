"""VAGENClass: environments written for VAGEN, with asynchronous `system_prompt`, `reset(seed)` and `step(text)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mobula.actors.environments.adapters.classes import OwnLoop, as_png
from mobula.actors.environments.base import IMAGE_PLACEHOLDER, Action, EnvironmentSpec, Message, Reset, Step
from mobula.cluster.user_code import load


class VAGENClass:
    """`target` is a class, called with `config` as the only argument.

    An observation is `{"obs_str": ..., "multi_modal_input": {"<image>": [PIL images]}}` with a placeholder for each
    image. `step` returns 4 values, with `done`, or 5 values, with `terminated` and `truncated`.

    Source: VAGEN, `vagen/envs/gym_image_env.py`.
    """

    def __init__(self, *, target: str, max_turns: int, config: Mapping[str, Any] | None = None) -> None:
        self._environment = load(target)(dict(config or {}))
        self._loop = OwnLoop()
        self.spec = EnvironmentSpec(max_turns=max_turns)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        observation, info = self._loop.run(self._environment.reset(seed))
        system = self._loop.run(self._environment.system_prompt())
        messages = [_message("system", system)] if system else []
        return Reset((*messages, _message("user", observation)), _texts(info))

    def step(self, action: Action) -> Step:
        observation, reward, *ends, info = self._loop.run(self._environment.step(action.text))
        terminated, truncated = ends if len(ends) == 2 else (ends[0], False)
        return Step((_message("user", observation),), reward, bool(terminated), bool(truncated), _texts(info))

    def close(self) -> None:
        self._loop.run(self._environment.close())
        self._loop.close()


def _message(role: str, observation: Any) -> Message:
    if isinstance(observation, str):
        return Message(role, observation)
    images = (observation.get("multi_modal_input") or {}).get(IMAGE_PLACEHOLDER, ())
    return Message(role, str(observation["obs_str"]), tuple(as_png(image) for image in images))


def _texts(info: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(info[key]) for key in ("answer", "solution") if key in info}
