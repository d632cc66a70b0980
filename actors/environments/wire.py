"""Observations, actions and steps as JSON; images are base64."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from mobula.actors.environments.base import Action, EnvironmentSpec, Message, Observation, Reset, Step, Tool

Json = dict[str, Any]


def observation_to_json(observation: Sequence[Message]) -> list[Json]:
    return [
        {"role": m.role, "text": m.text, "images": [base64.b64encode(p).decode("ascii") for p in m.images]}
        for m in observation
    ]


def observation_from_json(messages: Sequence[Mapping[str, Any]]) -> Observation:
    return tuple(
        Message(str(m["role"]), str(m["text"]), tuple(base64.b64decode(p, validate=True) for p in m["images"]))
        for m in messages
    )


def spec_to_json(spec: EnvironmentSpec) -> Json:
    tools = [{"name": t.name, "description": t.description, "parameters": dict(t.parameters)} for t in spec.tools]
    flags = {"is_deterministic": spec.is_deterministic, "demonstrates": spec.demonstrates}
    return {"max_turns": spec.max_turns, "tools": tools, **flags}


def spec_from_json(given: Mapping[str, Any]) -> EnvironmentSpec:
    tools = tuple(Tool(t["name"], t["description"], t["parameters"]) for t in given["tools"])
    return EnvironmentSpec(
        int(given["max_turns"]),
        tools,
        is_deterministic=bool(given["is_deterministic"]),
        demonstrates=bool(given["demonstrates"]),
    )


def action_to_json(action: Action) -> Json:
    calls = [
        {"name": c.name, "arguments": dict(c.arguments), "status": c.status, "detail": c.detail}
        for c in action.tool_calls
    ]
    return {"text": action.text, "tool_calls": calls, "is_truncated": action.is_truncated}


def reset_to_json(reset: Reset) -> Json:
    return {"observation": observation_to_json(reset.observation), "info": _texts(reset.info)}


def reset_from_json(given: Mapping[str, Any]) -> Reset:
    return Reset(observation_from_json(given["observation"]), given["info"])


def step_to_json(step: Step) -> Json:
    reward = dict(step.reward) if isinstance(step.reward, Mapping) else step.reward
    return {
        "observation": observation_to_json(step.observation),
        "reward": {k: float(v) for k, v in reward.items()} if isinstance(reward, dict) else float(reward),
        "terminated": bool(step.terminated),
        "truncated": bool(step.truncated),
        "info": _texts(step.info),
    }


def step_from_json(given: Mapping[str, Any]) -> Step:
    return Step(
        observation_from_json(given["observation"]),
        given["reward"],
        given["terminated"],
        given["truncated"],
        given["info"],
    )


def _texts(info: Mapping[str, Any]) -> Json:
    """The entries of `info` with JSON types; the client does not read the others."""
    return {str(k): v for k, v in info.items() if isinstance(v, str | bool | int | float) or v is None}
