"""AdapterGroup: the ranks that train adapters as one role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mobula.cluster.errors import CheckpointError
from mobula.cluster.recovery.lost_ranks import RestartedRanks
from mobula.cluster.training_service.interfaces import AdamParameters, AdapterSpec, LossCall, LossResult
from mobula.configs.schema import TimeoutsConfig
from mobula.learner.adapters.adapter import PartialResult
from mobula.learner.learner_group import ModelRanks

REFUSED = (ValueError, CheckpointError, OSError)  # errors with which ranks refuse a call and go on


class AdapterGroup(ModelRanks):
    """Implements `AdapterLearner` with `AdapterRank` or `FullWeightsRank` workers, one for each rank.

    Lost ranks are started again before the next call. They have no adapters: create them and load their states.

    Example:
        group = AdapterGroup(start_ranks, config.timeouts, ray.put)
        await group.start()
        await group.create("a", AdapterSpec(rank=8, alpha=16.0, seed=0))
    """

    def __init__(self, spawn: Callable[[], Sequence[Any]], timeouts: TimeoutsConfig, put: Callable[[Any], Any]) -> None:
        super().__init__(spawn, timeouts, "learner")
        self._put = put
        self.lost_ranks = RestartedRanks(self.respawn)

    async def create(self, adapter: str, spec: AdapterSpec) -> None:
        await self._each(
            lambda w: w.create.remote(adapter, spec),
            self._timeouts.update_s,
            f"to create the adapter {adapter}",
            REFUSED,
        )

    async def compute(self, calls: Sequence[LossCall]) -> list[LossResult | Exception]:
        """Runs calls of one or several adapters as one batch. The failure of a call is its result alone."""
        shared, what = self._put(list(calls)), f"to compute {len(calls)} calls"
        parts: list[list[PartialResult | Exception]]
        parts = await self._each(lambda w: w.compute.remote(shared), self._timeouts.update_s, what)
        return [_joined(of_ranks) for of_ranks in zip(*parts, strict=True)]

    async def step(self, adapter: str, parameters: AdamParameters) -> Mapping[str, float]:
        metrics: list[Mapping[str, float]] = await self._each(
            lambda w: w.step.remote(adapter, parameters), self._timeouts.update_s, f"to step {adapter}", REFUSED
        )
        return metrics[0]

    async def save(self, adapter: str, folder: Path) -> None:
        await self._stored(lambda w: w.save.remote(adapter, folder), f"to save {adapter} to {folder}")

    async def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        await self._stored(
            lambda w: w.load.remote(adapter, folder, with_optimizer=with_optimizer), f"to load {adapter} from {folder}"
        )

    async def export(self, adapter: str, folder: Path) -> None:
        await self._stored(lambda w: w.export.remote(adapter, folder), f"to export {adapter} to {folder}")

    async def drop(self, adapter: str) -> None:
        await self._each(lambda w: w.drop.remote(adapter), self._timeouts.update_s, f"to drop {adapter}", REFUSED)

    async def _stored(self, call: Callable[[Any], Any], what: str) -> None:
        await self._each(call, self._timeouts.checkpoint_s, what, REFUSED)


def _joined(parts: Sequence[PartialResult | Exception]) -> LossResult | Exception:
    """Failures are the same on all ranks."""
    failed = [part for part in parts if isinstance(part, Exception)]
    return failed[0] if failed else PartialResult.joined([p for p in parts if isinstance(p, PartialResult)])
