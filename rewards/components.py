"""Component: a named reward function with retries and a cache of scores by content."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence

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
    """Returns the components of a service (None: of all services), each after the components of its gates.

    Raises:
        ValueError: a function is unknown, or its options are wrong; the message names the component.
    """
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
