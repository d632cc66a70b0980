"""Ranks of a real run, of the policy and of its critic, that reach the moments of a `Saboteur` in a given step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from struck_roles import saboteur

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.learner.critic import Values
from mobula.learner.critic_ranks import CriticRank
from mobula.learner.learner import Learner
from mobula.learner.shares import Portion


class StruckCritic(CriticRank):
    """Faults come before it values the step that makes version V (`critic_values_V`) and after each of its optimizer
    steps (`critic_trains_V`)."""

    def connect(self, init_method: str) -> None:
        super().connect(init_method)
        saboteur().enlist(f"critic/{self._rank}")

    def value(
        self, groups: Sequence[ScoredGroup], version: int, kl: float | None, portion: Portion | None = None
    ) -> tuple[int, Values]:
        saboteur().moment(f"critic_values_{version}")
        return super().value(groups, version, kl, portion)

    def train(self, version: int, kl_scale: float) -> Any:
        with _reached_by_each_step_of(self._critic._optimizer, f"critic_trains_{version}"):
            return super().train(version, kl_scale)


class StruckLearner(Learner):
    """Faults come while the last block computes in a step, whose exchanges with other ranks are not over
    (`learner_computes_V`), and after each of its optimizer steps (`learner_trains_V`)."""

    def connect(self, init_method: str) -> None:
        super().connect(init_method)
        saboteur().enlist(f"learner/{self._rank}")

    def update(self, groups: Sequence[ScoredGroup], version: int, **more: Any) -> UpdateReport:
        def computes(*_: Any) -> None:
            saboteur().moment(f"learner_computes_{version}")

        *_, last = self.policy.blocks()
        hook = last.register_forward_pre_hook(computes)
        try:
            with _reached_by_each_step_of(self._optimizer, f"learner_trains_{version}"):
                return super().update(groups, version, **more)
        finally:
            hook.remove()


@contextmanager
def _reached_by_each_step_of(optimizer: Any, moment: str) -> Iterator[None]:
    hook = optimizer.register_step_post_hook(lambda *_: saboteur().moment(moment) and None)
    try:
        yield
    finally:
        hook.remove()
