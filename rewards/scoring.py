"""RewardScoring: runs the components of each response's recipe."""

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
    """Components of one service, or of all services, with the recipes.

    Example:
        scoring = RewardScoring(load_rewards(path), None, tools)
        rewards = scoring.rewards(requests)   # a Reward each, or the ComponentError with the reason why there is none
    """

    def __init__(self, rewards: RewardsConfig, service: str | None, tools: Tools) -> None:
        """With a `service` only its components run; outcomes of other services are passed as `earlier`.

        Raises:
            ValueError: a function is unknown, or its options are wrong.
        """
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
