"""Components of a reward: functions, weights and the sum."""

from __future__ import annotations

import hashlib
import json
from collections import ChainMap, OrderedDict
from collections.abc import Mapping, Sequence

from mobula.cluster.records.trajectory import Reward
from mobula.configs.schema.rewards import RewardComponent, RewardsConfig
from mobula.rewards.contract import (
    BatchRewardFunction,
    Outcome,
    RewardFunction,
    RewardRequest,
    Score,
    ScoringFailure,
    evaluate_batch,
)
from mobula.rewards.functions import build_function
from mobula.rewards.recipes import ComponentError, RecipeBook
from mobula.rewards.tools import Tools


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
        """Returns one outcome per request, in order. Raises the errors of `evaluate_batch`."""
        if self._cache_entries == 0:
            return self._tried(requests)
        keys = [content_key(request) for request in requests]
        new = {key: request for key, request in zip(keys, requests, strict=True) if key not in self._cache}
        self.num_cache_hits += len(keys) - len(new)
        outcomes: dict[bytes, Outcome] = {key: self._cache[key] for key in keys if key in self._cache}
        outcomes |= dict(zip(new, self._tried(list(new.values())), strict=True))
        for key in keys:
            self._remember(key, outcomes[key])
        return [outcomes[key] for key in keys]

    def _tried(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        outcomes = list(evaluate_batch(self._function, requests))
        for _ in range(self._retries):
            failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, ScoringFailure)]
            if not failed:
                break
            self.num_retried += len(failed)
            for i, outcome in zip(failed, evaluate_batch(self._function, [requests[i] for i in failed]), strict=True):
                outcomes[i] = outcome
        return outcomes

    def _remember(self, key: bytes, outcome: Outcome) -> None:
        if isinstance(outcome, ScoringFailure):  # not cached: a later try may succeed
            return
        self._cache[key] = outcome
        self._cache.move_to_end(key)
        while len(self._cache) > self._cache_entries:
            self._cache.popitem(last=False)


def build_components(rewards: RewardsConfig, service: str | None, tools: Tools) -> tuple[Component, ...]:
    """Returns the components of a service (None: of all services), each after the components of its gates."""
    order = rewards.gate_order()
    chosen = [c for c in rewards.components if service in (None, c.service)]
    return tuple(_build(component, tools) for component in sorted(chosen, key=lambda c: order.index(c.name)))


def content_key(request: RewardRequest) -> bytes:
    """Returns a key that is equal for requests that are equal to every reward function."""
    response = request.response
    said = [response.text, response.num_tokens, response.is_truncated, response.turns, response.failure]
    known = [request.prompt_text, request.references, dict(request.metadata)]
    digest = hashlib.sha256(json.dumps([*said, *known], sort_keys=True, default=repr).encode())
    for images in (response.images, request.prompt_images):
        digest.update(len(images).to_bytes(4, "big"))
        for image in images:
            digest.update(hashlib.sha256(image).digest())
    return digest.digest()


def _build(component: RewardComponent, tools: Tools) -> Component:
    try:
        function = build_function(component.function, component.options, tools)
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
        self.components: tuple[Component, ...] = build_components(rewards, service, tools)

    @property
    def num_retried(self) -> int:
        """Number of retried responses so far."""
        return sum(component.num_retried for component in self.components)

    def outcomes(
        self,
        requests: Sequence[RewardRequest],
        earlier: Sequence[Mapping[str, Outcome]] | None = None,
        judged: Sequence[bool] | None = None,
    ) -> list[dict[str, Outcome]]:
        """Returns component -> outcome for each request, for the components that ran, without `earlier` outcomes.
        `judged` names the requests on which judges run; the default is all.
        """
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
