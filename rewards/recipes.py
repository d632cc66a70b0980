"""Recipes: select the components of a response and combine their values to one reward.

    reward = sum of weight * value over the recipe's components   [/ sum of |weight| with `normalise`]

A component with a closed gate does not run and counts as 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Reward
from mobula.configs.schema.rewards import DEFAULT_RECIPE, RewardsConfig, for_label
from mobula.configs.schema.rewards import Recipe as RecipeConfig
from mobula.rewards.contract import FailureKind, Outcome, Score, ScoringFailure

RECIPE = "recipe"  # component name in errors if a response has no recipe, or its sum is not finite


class ComponentError(RewardError):
    """A component could not score a response. It gets no reward: a sum without a part would be another reward."""

    def __init__(self, component: str, kind: FailureKind, reason: str) -> None:
        super().__init__(component, kind, reason)
        self.component = component
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return f"reward component {self.component!r} {self.kind}: {self.reason}"


@dataclass(frozen=True)
class BuiltRecipe:
    """One recipe. `gates` maps a component to conditions: the minimum values of other components. `judges` are not
    trained."""

    weights: Mapping[str, float]
    gates: Mapping[str, tuple[tuple[str, float], ...]]
    scale: float  # of the sum
    judges: frozenset[str] = frozenset()

    def wants(self, component: str, outcomes: Mapping[str, Outcome], *, is_judged: bool = True) -> bool:
        """Whether a component has to run, given the outcomes of earlier components. Judges run if `is_judged`."""
        if component not in self.weights or (component in self.judges and not is_judged):
            return False
        return component not in self.gates or self._shut_gate(component, outcomes) is None

    def reward(self, outcomes: Mapping[str, Outcome]) -> Reward:
        """Combines the outcomes of all components to one reward. `Reward.components` has the unweighted values, without
        judges that did not run or failed.
        """
        values: dict[str, float] = {}
        reasons: dict[str, str] = {}
        for name, outcome in outcomes.items():
            if isinstance(outcome, ScoringFailure):
                if name in self.judges:
                    reasons[name] = f"{outcome.kind}: {outcome.reason}"
                    continue
                raise ComponentError(name, outcome.kind, outcome.reason)
            values[name] = outcome.value
            if outcome.reason:
                reasons[name] = outcome.reason
        for name in self.weights.keys() - values.keys() - self.judges:
            needs, at_least = self._shut_gate(name, outcomes) or (None, None)
            assert needs is not None, f"component {name!r} neither ran nor was kept from it"
            reasons[name] = f"not run: {needs} is below {at_least:g}"
        return Reward(self._total(values), values, reasons)

    def _total(self, values: Mapping[str, float]) -> float:
        try:
            total = self.scale * math.fsum(self.weights[name] * value for name, value in values.items())
        except OverflowError:
            total = math.inf
        if not math.isfinite(total):
            raise ComponentError(RECIPE, FailureKind.NOT_FINITE, f"no float holds the weighted sum of {dict(values)}")
        return total

    def _shut_gate(self, component: str, outcomes: Mapping[str, Outcome]) -> tuple[str, float] | None:
        """Returns the first condition of a component that is not met; None if all are met."""
        for needs, at_least in self.gates.get(component, ()):
            outcome = outcomes.get(needs)
            if not isinstance(outcome, Score) or outcome.value < at_least:
                return needs, at_least
        return None


_TRAINING_ID = re.compile(r"\d+/(\d+)/")  # of a training prompt: epoch/position/sample


def is_judged(prompt_id: str, interval: int) -> bool:
    """Whether judges score the responses to a prompt: every `interval`-th of the training prompts (0: none), and all
    held-out prompts."""
    found = _TRAINING_ID.match(prompt_id)
    return found is None or (interval > 0 and int(found[1]) % interval == 0)


class RecipeBook:
    """The recipes of a run, by label."""

    def __init__(self, rewards: RewardsConfig) -> None:
        self._rewards = rewards
        self._recipes = {label: _ready(rewards, recipe) for label, recipe in rewards.active_recipes.items()}

    def label(self, metadata: Mapping[str, Any]) -> str:
        """Returns the label in a row's metadata."""
        return self._rewards.label_of(metadata)

    def find(self, label: str) -> BuiltRecipe | None:
        """Returns the recipe of a label, or the default recipe; None if there is neither."""
        return for_label(self._recipes, label)

    def judge_failures(self, outcomes: Mapping[str, Outcome]) -> dict[str, ScoringFailure]:
        """Returns the failures of judges, which cost no response its reward."""
        judges = self._rewards.judge_weights
        return {n: o for n, o in outcomes.items() if n in judges and isinstance(o, ScoringFailure)}

    def reward(self, label: str, outcomes: Mapping[str, Outcome]) -> Reward:
        """Returns the reward of a response."""
        recipe = self.find(label)
        if recipe is None:
            known = ", ".join(self._recipes)
            reason = f"no recipe for the label {label!r} (there is {known}): add it, or one named {DEFAULT_RECIPE}"
            raise ComponentError(RECIPE, FailureKind.FAILED, reason)
        return recipe.reward(outcomes)


def _ready(rewards: RewardsConfig, recipe: RecipeConfig) -> BuiltRecipe:
    weights = rewards.weights_in(recipe)
    gates: dict[str, tuple[tuple[str, float], ...]] = {}
    for gate in recipe.gates:
        gates[gate.component] = (*gates.get(gate.component, ()), (gate.needs, gate.at_least))
    scale = 1 / math.fsum(map(abs, weights.values())) if recipe.normalise else 1.0
    return BuiltRecipe(weights, gates, scale, frozenset(rewards.judge_weights.keys() & weights.keys()))
