"""Components of a reward, and recipes, which select components and combine their values."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import ChainMap, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response, Reward
from mobula.configs.schema.rewards import DEFAULT_RECIPE, RewardComponent, RewardsConfig, for_label
from mobula.configs.schema.rewards import Recipe as RecipeConfig
from mobula.rewards.contract import (
    BatchRewardFunction,
    FailureKind,
    Outcome,
    RewardFunction,
    RewardRequest,
    Score,
    ScoringFailure,
    evaluate_batch,
    failure,
)
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.environments import python_of
from mobula.rewards.tools import Tools

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
        judges that did not run or failed."""
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
        try:
            total = self.scale * math.fsum(self.weights[name] * value for name, value in values.items())
        except OverflowError:
            total = math.inf
        if not math.isfinite(total):
            raise ComponentError(RECIPE, FailureKind.NOT_FINITE, f"no float holds the weighted sum of {dict(values)}")
        return Reward(total, values, reasons)

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
        return self._rewards.label_of(metadata)

    def find(self, label: str) -> BuiltRecipe | None:
        """Returns the recipe of a label, or the default recipe; None if there is neither."""
        return for_label(self._recipes, label)

    def judge_failures(self, outcomes: Mapping[str, Outcome]) -> dict[str, ScoringFailure]:
        """The failures of judges, which cost no response its reward."""
        judges = self._rewards.judge_weights
        return {n: o for n, o in outcomes.items() if n in judges and isinstance(o, ScoringFailure)}

    def reward(self, label: str, outcomes: Mapping[str, Outcome]) -> Reward:
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


class Component:
    """Scores responses. Failed responses are retried `retries` times, and scores are cached up to a maximum number."""

    def __init__(
        self, name: str, function: RewardFunction | BatchRewardFunction, *, retries: int, cache_entries: int
    ) -> None:
        self.name = name
        self._function = function
        self._retries = retries
        self._cache_entries = cache_entries
        self._cache: OrderedDict[bytes, Score] = OrderedDict()
        self.num_cache_hits = 0
        self.num_retried = 0

    def evaluate(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """Returns one outcome per request, in order. A failed episode has no score: 0 would be trained on. Raises the
        errors of `evaluate_batch`."""
        failures = [request.response.failure for request in requests]
        scored = iter(self._scored([request for request in requests if not request.response.failure]))
        return [failure(RewardError(f"the episode failed: {f}")) if f else next(scored) for f in failures]

    def _scored(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        if self._cache_entries == 0:
            return self._tried(requests)
        keys = [content_key(request) for request in requests]
        new = {key: request for key, request in zip(keys, requests, strict=True) if key not in self._cache}
        self.num_cache_hits += len(keys) - len(new)
        outcomes: dict[bytes, Outcome] = {key: self._cache[key] for key in keys if key in self._cache}
        outcomes |= dict(zip(new, self._tried(list(new.values())), strict=True))
        for key in keys:
            outcome = outcomes[key]
            if isinstance(outcome, ScoringFailure):  # not cached: a later try may succeed
                continue
            self._cache[key] = outcome
            self._cache.move_to_end(key)
            while len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)
        return [outcomes[key] for key in keys]

    def _tried(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        outcomes = list(evaluate_batch(self._function, requests)) if requests else []
        for _ in range(self._retries):
            failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, ScoringFailure)]
            if not failed:
                break
            self.num_retried += len(failed)
            for i, outcome in zip(failed, evaluate_batch(self._function, [requests[i] for i in failed]), strict=True):
                outcomes[i] = outcome
        return outcomes


def content_key(request: RewardRequest) -> bytes:
    """Returns a key that is equal for requests that are equal to every reward function."""
    known = [request.prompt_text, request.references, dict(request.metadata), request.response.turns]
    digest = hashlib.sha256(response_digest(request.response))
    digest.update(json.dumps(known, sort_keys=True, default=repr).encode())
    for image in request.prompt_images:
        digest.update(hashlib.sha256(image).digest())
    return digest.digest()


def response_digest(response: Response) -> bytes:
    """Returns a digest that is equal for responses that are equal to every reward function."""
    turns = [[turn.action, turn.observation, dict(turn.rewards)] for turn in response.turns]
    parts = [response.text, response.num_tokens, response.is_truncated, response.failure, turns]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for image in response.images:
        digest.update(hashlib.sha256(image).digest())  # one digest per file, so that boundaries of files count
    return digest.digest()


def _build(component: RewardComponent, rewards: RewardsConfig, tools: Tools) -> Component:
    try:
        own = tools.of_python(python_of(component, rewards, tools.start_timeout_s))
        function = build_function(component.function, component.options, own)
    except ValueError as error:
        raise ValueError(f"rewards.components[{component.name}]: {error}") from error
    return Component(component.name, function, retries=component.retries, cache_entries=component.cache_entries)


class RewardScoring:
    """Components of one service, or of all services, with the recipes.

    Example:
        scoring = RewardScoring(load_rewards(path), None, tools)
        rewards = scoring.rewards(requests)   # a Reward each, or the ComponentError with the reason why there is none
    """

    def __init__(self, rewards: RewardsConfig, service: str | None, tools: Tools) -> None:
        """With a `service` only its components run; outcomes of other services are passed as `earlier`."""
        self.book = RecipeBook(rewards)
        order = rewards.gate_order()  # a component comes after the components of its gates
        chosen = sorted(rewards.components, key=lambda component: order.index(component.name))
        self.components = tuple(_build(c, rewards, tools) for c in chosen if service in (None, c.service))

    @property
    def num_retried(self) -> int:
        return sum(component.num_retried for component in self.components)

    def outcomes(
        self,
        requests: Sequence[RewardRequest],
        earlier: Sequence[Mapping[str, Outcome]] | None = None,
        judged: Sequence[bool] | None = None,
    ) -> list[dict[str, Outcome]]:
        """Returns component -> outcome for each request, for the components that ran, without `earlier` outcomes.
        `judged` names the requests on which judges run; the default is all."""
        judged = [True] * len(requests) if judged is None else judged
        recipes = [self.book.find(self.book.label(request.metadata)) for request in requests]
        outcomes: list[dict[str, Outcome]] = [{} for _ in requests]
        known: Sequence[Mapping[str, Outcome]] = outcomes
        if earlier is not None:
            known = [ChainMap(own, dict(others)) for own, others in zip(outcomes, earlier, strict=True)]
        for component in self.components:
            wanted = [
                i
                for i, recipe in enumerate(recipes)
                if recipe is not None and recipe.wants(component.name, known[i], is_judged=judged[i])
            ]
            for i, outcome in zip(wanted, component.evaluate([requests[i] for i in wanted]), strict=True):
                outcomes[i][component.name] = outcome
        return outcomes

    def rewards(self, requests: Sequence[RewardRequest]) -> list[Reward | ComponentError]:
        """Returns one reward per request, in order. The scoring must have all components."""
        outcomes = self.outcomes(requests)
        return [self._reward(request, outcome) for request, outcome in zip(requests, outcomes, strict=True)]

    def _reward(self, request: RewardRequest, outcomes: Mapping[str, Outcome]) -> Reward | ComponentError:
        try:
            return self.book.reward(self.book.label(request.metadata), outcomes)
        except ComponentError as error:
            return error
