"""AdapterGroup: the ranks that train adapters as one role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mobula.cluster.training_service.interfaces import AdamParameters, AdapterSpec, LossCall, LossResult
from mobula.configs.schema import TimeoutsConfig
from mobula.learner.adapters.call_batch import PartialResult
from mobula.learner.learner_group import ModelRanks


class AdapterGroup(ModelRanks):
    """Implements `AdapterLearner` with `mobula.learner.adapters.rank.AdapterRank` workers, one for each rank.

    Calls run one after another. After `respawn` there are no adapters: create and load them again.

    Example:
        group = AdapterGroup(start_ranks, config.timeouts, ray.put)
        await group.start()
        await group.create("a", AdapterSpec(rank=8, alpha=16.0, seed=0))
    """

    def __init__(self, spawn: Callable[[], Sequence[Any]], timeouts: TimeoutsConfig, put: Callable[[Any], Any]) -> None:
        """`put` is as in `LearnerGroup`."""
        super().__init__(spawn, timeouts, "learner")
        self._put = put

    async def create(self, adapter: str, spec: AdapterSpec) -> None:
        calls = [w.create.remote(adapter, spec) for w in self._workers]
        await self._all(calls, self._timeouts.update_s, f"to create the adapter {adapter}")

    async def compute(self, calls: Sequence[LossCall]) -> list[LossResult | Exception]:
        """Runs calls of one or several adapters as one batch. The failure of a call is its result alone."""
        shared = self._put(list(calls))
        answers = [w.compute.remote(shared) for w in self._workers]
        what = f"to compute {len(calls)} calls"
        parts: list[list[PartialResult | Exception]] = await self._each(answers, self._timeouts.update_s, what)
        return [_joined(of_ranks) for of_ranks in zip(*parts, strict=True)]

    async def step(self, adapter: str, parameters: AdamParameters) -> Mapping[str, float]:
        """Applies and clears the gradient; returns metrics."""
        calls = [w.step.remote(adapter, parameters) for w in self._workers]
        metrics: Mapping[str, float] = await self._all(calls, self._timeouts.update_s, f"to step {adapter}")
        return metrics

    async def save(self, adapter: str, folder: Path) -> None:
        calls = [w.save.remote(adapter, folder) for w in self._workers]
        await self._all(calls, self._timeouts.checkpoint_s, f"to save {adapter} to {folder}")

    async def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        calls = [w.load.remote(adapter, folder, with_optimizer=with_optimizer) for w in self._workers]
        await self._all(calls, self._timeouts.checkpoint_s, f"to load {adapter} from {folder}")

    async def export(self, adapter: str, folder: Path) -> None:
        calls = [w.export.remote(adapter, folder) for w in self._workers]
        await self._all(calls, self._timeouts.checkpoint_s, f"to export {adapter} to {folder}")

    async def drop(self, adapter: str) -> None:
        calls = [w.drop.remote(adapter) for w in self._workers]
        await self._all(calls, self._timeouts.update_s, f"to drop {adapter}")


def _joined(parts: Sequence[PartialResult | Exception]) -> LossResult | Exception:
    """Failures are the same on all ranks."""
    failed = [part for part in parts if isinstance(part, Exception)]
    return failed[0] if failed else PartialResult.joined([p for p in parts if isinstance(p, PartialResult)])
