"""One optimizer step over rows of any kind: split, forward, backward, step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from torch import Tensor

from mobula.configs.schema import LearnerConfig
from mobula.learner.backends.base import Backend, Optimizer
from mobula.learner.policies.base import PolicyRow
from mobula.learner.policies.packing import split_microbatches


class TrainableRow(Protocol):
    @property
    def sequence(self) -> PolicyRow: ...

    @property
    def group(self) -> int | None:
        """Group of the row's siblings; None for a row without siblings."""

    def untrained(self) -> Self:
        """Returns the row without trained tokens."""


R = TypeVar("R", bound=TrainableRow)


@dataclass(frozen=True)
class Term(Generic[R]):
    """A part of a loss: the sum of `loss` over micro-batches of `rows`."""

    rows: Sequence[R]
    loss: Callable[[Sequence[R]], Tensor]


@dataclass(eq=False)
class GradientStep:
    """Takes optimizer steps with the rank's own share of the rows; every rank is called with all of them."""

    backend: Backend
    optimizer: Optimizer
    config: LearnerConfig
    rank: int
    world_size: int

    def __call__(self, rows: Sequence[R], loss: Callable[[Sequence[R]], Tensor], learning_rate: float) -> float:
        """One step on the sum of `loss` over all micro-batches of all ranks; returns the gradient norm. Collective."""
        return self.on_sum([Term(rows, loss)], learning_rate)

    def on_sum(
        self, terms: Sequence[Term[Any]], learning_rate: float, before_step: Callable[[], None] | None = None
    ) -> float:
        """One step on the sum of several terms, each over rows of its own; returns the gradient norm. Collective.

        `before_step` runs after the gradient is complete and before the weights change.
        """
        work = [(term.loss, share) for term in terms for share in self.shares(term.rows)]
        for n, (loss, share) in enumerate(work):
            # Where memory allows, ranks exchange gradients once, at the last micro-batch of all terms.
            self.backend.backward(loss(share), is_last=n == len(work) - 1)
        if before_step is not None:
            before_step()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return self.backend.step(self.optimizer, max_grad_norm=self.config.max_grad_norm)

    def shares(self, rows: Sequence[R]) -> list[list[R]]:
        """This rank's micro-batches."""
        return shares_of_ranks(rows, self.config, self.world_size)[self.rank]


def shares_of_ranks(rows: Sequence[R], config: LearnerConfig, num_ranks: int) -> list[list[list[R]]]:
    """For each rank its micro-batches, as many as every other rank has; the shortest row, untrained, fills them up.

    Ranks that share the tokens of rows (`learner.sequence_parallel`) have the same ones.
    """
    num_sharing = config.sequence_parallel
    plan = split_microbatches([row.sequence for row in rows], config, num_ranks // num_sharing, _groups(rows))

    # Every forward and backward is a collective: a rank without rows computes one that teaches nothing.
    is_short = any(not share for shares in plan for share in shares)
    stand_in = [min(rows, key=lambda row: row.sequence.num_tokens).untrained()] if is_short else []
    own = [[[rows[i] for i in share] or stand_in for share in shares] for shares in plan]
    return [shares for shares in own for _ in range(num_sharing)]


def _groups(rows: Sequence[TrainableRow]) -> list[int] | None:
    groups = [row.group for row in rows if row.group is not None]
    return groups if len(groups) == len(rows) else None
