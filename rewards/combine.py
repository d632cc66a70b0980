"""The weighted sum of named components: one response's request to one `Reward`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import RewardError
from cluster.trajectory import Reward
from configs.schema import RewardComponent
from rewards.contract import FailureKind, RewardFunction, RewardRequest, evaluate, failure_kind
from rewards.functions import build_function
from rewards.tools import Tools


@dataclass(frozen=True)
class Component:
    """One named, weighted reward function."""

    name: str
    weight: float
    function: RewardFunction


class ComponentError(RewardError):
    """A component could not score a response, so nobody can: a sum without one of its parts is another reward."""

    def __init__(self, component: str, kind: FailureKind, reason: str) -> None:
        super().__init__(component, kind, reason)
        self.component = component
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return f"reward component {self.component!r} {self.kind}: {self.reason}"


def build_components(components: Sequence[RewardComponent], tools: Tools) -> tuple[Component, ...]:
    """Components as configured, each name once.

    Raises:
        ValueError: there is no component, a name comes twice, or a function is unfit.
    """
    if not components:
        raise ValueError("rewards.components is empty: name at least one")
    name, count = Counter(component.name for component in components).most_common(1)[0]
    if count > 1:
        raise ValueError(f"rewards.components names {name!r} {count} times: give each component its own name")
    return tuple(_build(component, tools) for component in components)


def score_response(components: Sequence[Component], request: RewardRequest) -> Reward:
    """The weighted sum over all components; `Reward.components` keeps each unweighted value, `reasons` what was said.

    Raises:
        ComponentError: a component failed, timed out or was not finite.
    """
    scores = {}
    for component in components:
        try:
            scores[component.name] = evaluate(component.function, request)
        except RewardError as error:
            raise ComponentError(component.name, failure_kind(error), str(error)) from error
    return Reward(
        value=math.fsum(component.weight * scores[component.name].value for component in components),
        components={name: score.value for name, score in scores.items()},
        reasons={name: score.reason for name, score in scores.items() if score.reason},
    )


def _build(component: RewardComponent, tools: Tools) -> Component:
    try:
        function = build_function(component.function, component.options, tools)
    except ValueError as error:
        raise ValueError(f"rewards.components[{component.name}]: {error}") from error
    return Component(component.name, component.weight, function)
