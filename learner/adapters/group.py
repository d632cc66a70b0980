"""AdapterGroup: the ranks that train adapters as one role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mobula.cluster.errors import CheckpointError, DeadlineError
from mobula.cluster.training_service.interfaces import AdamParameters, AdapterSpec, LossCall, LossResult
from mobula.configs.schema import TimeoutsConfig
from mobula.learner.adapters.calls import PartialResult
from mobula.learner.learner_group import ModelRanks


class AdapterGroup(ModelRanks):
    """Implements `AdapterLearner` with `AdapterRank` or `FullWeightsRank` workers, one for each rank.

    A call that fails for another reason than its arguments means that a rank is lost, or waits in a collective for one
    that is. The next call then starts all ranks again. They have no adapters: create them and load their states.

    Example:
        group = AdapterGroup(start_ranks, config.timeouts, ray.put)
        await group.start()
        await group.create("a", AdapterSpec(rank=8, alpha=16.0, seed=0))
    """

    def __init__(self, spawn: Callable[[], Sequence[Any]], timeouts: TimeoutsConfig, put: Callable[[Any], Any]) -> None:
        """`spawn` and `put` are as in `LearnerGroup`."""
        super().__init__(spawn, timeouts, "learner")
        self._put = put
        self._is_lost = False
        self._restarting = asyncio.Lock()

    async def create(self, adapter: str, spec: AdapterSpec) -> None:
        timeout_s = self._timeouts.update_s
        await self._called(lambda w: w.create.remote(adapter, spec), timeout_s, f"to create the adapter {adapter}")

    async def compute(self, calls: Sequence[LossCall]) -> list[LossResult | Exception]:
        """Runs calls of one or several adapters as one batch. The failure of a call is its result alone."""
        shared, what = self._put(list(calls)), f"to compute {len(calls)} calls"
        parts: list[list[PartialResult | Exception]]
        parts = await self._called(lambda w: w.compute.remote(shared), self._timeouts.update_s, what, refuses=())
        return [_joined(of_ranks) for of_ranks in zip(*parts, strict=True)]

    async def step(self, adapter: str, parameters: AdamParameters) -> Mapping[str, float]:
        """Applies and clears the gradient; returns metrics."""
        timeout_s = self._timeouts.update_s
        metrics: list[Mapping[str, float]]
        metrics = await self._called(lambda w: w.step.remote(adapter, parameters), timeout_s, f"to step {adapter}")
        return metrics[0]

    async def save(self, adapter: str, folder: Path) -> None:
        timeout_s, what = self._timeouts.checkpoint_s, f"to save {adapter} to {folder}"
        await self._called(lambda w: w.save.remote(adapter, folder), timeout_s, what)

    async def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        timeout_s, what = self._timeouts.checkpoint_s, f"to load {adapter} from {folder}"
        await self._called(lambda w: w.load.remote(adapter, folder, with_optimizer=with_optimizer), timeout_s, what)

    async def export(self, adapter: str, folder: Path) -> None:
        timeout_s, what = self._timeouts.checkpoint_s, f"to export {adapter} to {folder}"
        await self._called(lambda w: w.export.remote(adapter, folder), timeout_s, what)

    async def drop(self, adapter: str) -> None:
        await self._called(lambda w: w.drop.remote(adapter), self._timeouts.update_s, f"to drop {adapter}")

    async def _called(
        self,
        call: Callable[[Any], Any],
        timeout_s: float,
        what: str,
        refuses: tuple[type[Exception], ...] = (ValueError, CheckpointError, OSError),
    ) -> list[Any]:
        """Calls all ranks and returns their results; starts lost ranks again first.

        Args:
            refuses: errors with which ranks refuse a call and go on.
        """
        async with self._restarting:
            if self._is_lost:
                await self.respawn()
                self._is_lost = False
        workers = self._workers
        try:
            return await self._each([call(worker) for worker in workers], timeout_s, what)
        except Exception as error:
            is_refused = isinstance(error, refuses) and not isinstance(error, DeadlineError)  # which is an OSError
            # Calls to ranks of before a restart fail as well; they do not restart the new ones.
            self._is_lost |= not is_refused and workers is self._workers
            raise


def _joined(parts: Sequence[PartialResult | Exception]) -> LossResult | Exception:
    """Failures are the same on all ranks."""
    failed = [part for part in parts if isinstance(part, Exception)]
    return failed[0] if failed else PartialResult.joined([p for p in parts if isinstance(p, PartialResult)])
