"""Scoring: responses to outcomes by component, each component run only where a response's recipe asks for it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence

from mobula.cluster.records.trajectory import Reward
from mobula.configs.schema.rewards import RewardsConfig
from mobula.rewards.components import Component, build_components
from mobula.rewards.contract import Outcome, RewardRequest
from mobula.rewards.recipes import ComponentError, RecipeBook
from mobula.rewards.tools import Tools


class RewardScoring:
    """The components of one service, or of all, with the recipes that need them.

    Example:
        scoring = Scoring(load_rewards(path), None, tools)
        rewards = scoring.rewards(requests)   # a Reward each, or the ComponentError with the reason why there is none
    """

    def __init__(self, rewards: RewardsConfig, service: str | None, tools: Tools) -> None:
        """With a `service`, only its components run, and others' outcomes come in as `earlier`.

        Raises:
            ValueError: a function is unknown, or its options are unfit.
        """
        self.book = RecipeBook(rewards)
        self.components: tuple[Component, ...] = build_components(rewards, service, tools)

    @property
    def num_retried(self) -> int:
        """Responses that a component was given again, so far."""
        return sum(component.num_retried for component in self.components)

    def outcomes(
        self, requests: Sequence[RewardRequest], earlier: Sequence[Mapping[str, Outcome]] | None = None
    ) -> list[dict[str, Outcome]]:
        """One mapping a request, component -> outcome, of the components that ran; `earlier` ones are not repeated."""
        recipes = [self.book.find(self.book.label(request.metadata)) for request in requests]
        found: list[dict[str, Outcome]] = [{} for _ in requests]
        known: Sequence[Mapping[str, Outcome]] = found
        if earlier is not None:
            known = [ChainMap(own, dict(others)) for own, others in zip(found, earlier, strict=True)]
        for component in self.components:
            wanted = [
                i for i, recipe in enumerate(recipes) if recipe is not None and recipe.wants(component.name, known[i])
            ]
            for i, outcome in zip(wanted, component.evaluate([requests[i] for i in wanted]), strict=True):
                found[i][component.name] = outcome
        return found

    def rewards(self, requests: Sequence[RewardRequest]) -> list[Reward | ComponentError]:
        """One reward a request, in order, of a scoring that has all components."""
        outcomes = self.outcomes(requests)
        return [self._reward(request, outcome) for request, outcome in zip(requests, outcomes, strict=True)]

    def _reward(self, request: RewardRequest, outcomes: Mapping[str, Outcome]) -> Reward | ComponentError:
        try:
            return self.book.reward(self.book.label(request.metadata), outcomes)
        except ComponentError as error:
            return error
