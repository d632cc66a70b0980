"""Simulated Ray actors: learner ranks, reference scorers and reward workers that wait instead of computing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.records.trajectory import GroupSummary, Prompt, ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.configs.schema.rewards import RewardsConfig
from mobula.deploy.rehearsal.simulated.engine import SimulatedGroup
from mobula.deploy.rehearsal.simulated.machine import Cores
from mobula.learner.shares import Portion
from mobula.rewards.components import RecipeBook
from mobula.rewards.contract import Score
from mobula.rewards.pool.worker import GroupOutcomes, Question

if TYPE_CHECKING:
    from mobula.deploy.rehearsal.speeds import Speeds


class SimulatedReply:
    def __init__(self, result: Future[Any]) -> None:
        self._result = result

    def future(self) -> Future[Any]:
        return self._result


class _Method:
    """A method of a simulated actor; `remote` begins a call and returns at once."""

    def __init__(self, handle: Handle, call: Callable[..., Coroutine[Any, Any, Any]], num_returns: int = 1) -> None:
        self._handle = handle
        self._call = call
        self._num_returns = num_returns

    def options(self, *, num_returns: int = 1, concurrency_group: str = "") -> _Method:
        return _Method(self._handle, self._call, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        result: Future[Any] = Future()
        self._handle.begin(self._call(*args, **kwargs), result)
        return SimulatedReply(result) if self._num_returns == 1 else [SimulatedReply(result)] * self._num_returns


class Handle:
    """Stands for a Ray actor handle. Calls of a lost worker fail."""

    def __init__(self, worker: Any, name: str) -> None:
        self.name = name
        self._worker = worker
        self._calls: dict[Future[Any], asyncio.Task[None]] = {}
        self._death: Exception | None = None

    def __getattr__(self, method: str) -> _Method:
        return _Method(self, getattr(self._worker, method))

    def begin(self, call: Coroutine[Any, Any, Any], result: Future[Any]) -> None:
        if self._death is not None:
            call.close()
            result.set_exception(self._death)
            return
        self._calls[result] = asyncio.create_task(self._run(call, result))

    def lose(self, error: WorkerDiedError) -> None:
        """Ends the process: calls in progress and later ones fail."""
        self._death = error
        calls, self._calls = self._calls, {}
        for result, task in calls.items():
            task.cancel()
            if not result.done():
                result.set_exception(error)

    async def _run(self, call: Coroutine[Any, Any, Any], result: Future[Any]) -> None:
        try:
            value = await call
        except Exception as error:
            if not result.done():
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(value)
        finally:
            self._calls.pop(result, None)


class SimulatedRanks:
    """What all learner ranks of a run share. The slowest rank of an update is the last one of all."""

    def __init__(
        self, speeds: Speeds, num_ranks: int, manifest: Manifest, cores: Cores, state_bytes: float = 0.0
    ) -> None:
        """`manifest`: the pushed tensors. `state_bytes`: the part of a checkpoint that one rank writes."""
        self.speeds = speeds
        self.num_ranks = num_ranks
        self.manifest = manifest
        self.cores = cores
        self.state_s = state_bytes / speeds.storage_bytes_per_s
        self.push_s = speeds.push_s + manifest.num_bytes / speeds.push_bytes_per_s
        self.slow_down: dict[int, float] = {}  # rank -> factor on its seconds
        self.disk_error: OSError | None = None  # of writes from now on
        self.busy_s = 0.0
        self.borrowed = 0  # references that all ranks have received
        self._updating: dict[int, asyncio.Task[float]] = {}  # by version

    async def update(self, groups: Sequence[ScoredGroup], version: int) -> None:
        """Waits for the step that makes `version`; one timer for all ranks."""
        if version not in self._updating:
            self._updating = {version: asyncio.create_task(self._compute(groups))}
        await asyncio.shield(self._updating[version])

    def forget(self) -> None:
        for task in self._updating.values():
            task.cancel()
        self._updating = {}

    async def _compute(self, groups: Sequence[ScoredGroup]) -> float:
        started_s = asyncio.get_running_loop().time()
        tokens = sum(map(row_tokens, (group.summary for group in groups))) / self.num_ranks
        sampled = sum(group.summary.num_tokens for group in groups) / self.num_ranks
        slowest = max(self.slow_down.values(), default=1.0)
        speeds = self.speeds
        fixed_s = speeds.update_s + (speeds.exchange_s if self.num_ranks > 1 else 0.0)
        seconds = slowest * (fixed_s + tokens / speeds.learner_tokens_per_s + sampled * speeds.learner_response_s)
        await self.cores.compute(seconds, num_threads=self.num_ranks)
        self.busy_s += asyncio.get_running_loop().time() - started_s
        return seconds


class SimulatedRank:
    """One learner rank: the calls of `mobula.learner.learner_group.LearnerGroup`."""

    def __init__(self, ranks: SimulatedRanks, index: int) -> None:
        self._ranks = ranks
        self._index = index
        self._version = 0

    async def rendezvous_address(self) -> str:
        return "rehearsal:1"

    async def connect(self, address: str) -> None:
        await asyncio.sleep(self._ranks.speeds.start_s)

    async def is_alive(self) -> Vitals:
        return Vitals("rehearsal", 0, None, None)

    async def begin_rl(self) -> None: ...

    async def export(self, folder: Path) -> None:
        await self._write()

    async def update(
        self, groups: Sequence[ScoredGroup], version: int, *, portion: Portion | None = None, **more: Any
    ) -> UpdateReport:
        self._ranks.borrowed += _num_references(groups, portion)
        await self._ranks.update(groups, version)
        self._version = version
        return UpdateReport(version, {} if self._index else _metrics(groups))

    async def manifest(self) -> Manifest:
        return self._ranks.manifest

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        return Rendezvous("rehearsal", 1, epoch, 1 + num_receivers, "gloo", 60.0)

    async def join_transfer(self, rendezvous: Rendezvous) -> None: ...

    async def leave_transfer(self, epoch: int) -> None: ...

    async def send_weights(
        self, bucket_bytes: int, epoch: int, step: VersionStep | None = None
    ) -> PushedChanges | None:
        await self._ranks.cores.compute(self._ranks.push_s)
        return None if step is None else PushedChanges(0, 0)

    async def export_buckets(self, bucket_bytes: int) -> int:
        await self._ranks.cores.compute(self._ranks.push_s)
        return self._version

    async def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        return np.zeros(max(0, prompt.num_tokens - 1), dtype=np.float32)

    async def save(self, folder: Path) -> None:
        (folder / f"rank-{self._index}").write_text(str(self._version))

    async def finish_save(self) -> None:
        await self._write()

    async def load(self, folder: Path) -> int:
        await asyncio.sleep(self._ranks.state_s)
        self._version = int((folder / "rank-0").read_text())
        return self._version

    async def offload(self, part: str) -> None: ...

    async def onload(self) -> None: ...

    async def close(self) -> None: ...

    async def _write(self) -> None:
        if self._ranks.disk_error is not None:
            raise self._ranks.disk_error
        await asyncio.sleep(self._ranks.state_s)


class SimulatedWorker:
    async def ping(self) -> bool:
        return True

    async def is_alive(self) -> Vitals:
        return Vitals("rehearsal", 0, None, None)

    async def close(self) -> None: ...


@dataclass
class SimulatedScorer(SimulatedWorker):
    load_s: float
    tokens_per_s: float
    response_s: float
    call_s: float
    cores: Cores
    busy_s: float = 0.0

    async def load(self, folder: Path) -> None:
        await asyncio.sleep(self.load_s)

    async def score(self, groups: Sequence[ScoredGroup]) -> None:
        started_s = asyncio.get_running_loop().time()
        tokens = sum(row_tokens(group.summary) for group in groups)
        sampled = sum(group.summary.num_tokens for group in groups)
        await self.cores.compute(self.call_s + tokens / self.tokens_per_s + sampled * self.response_s)
        self.busy_s += asyncio.get_running_loop().time() - started_s

    async def score_one(self, group: ScoredGroup) -> None:
        await self.score([group])


class SimulatedRewards(SimulatedWorker):
    """One reward worker of a service. A component's value is 0 or 1, drawn by prompt and sibling."""

    def __init__(self, rewards: RewardsConfig, service: str, group_s: float) -> None:
        self.busy_s = 0.0
        self._names = [component.name for component in rewards.components if component.service == service]
        self._book = RecipeBook(rewards)
        self._group_s = group_s
        self._lock = asyncio.Lock()  # one call at a time, as a RewardWorker

    async def score(self, questions: Sequence[Question]) -> list[GroupOutcomes]:
        async with self._lock:
            await asyncio.sleep(self._group_s * len(questions))
            self.busy_s += self._group_s * len(questions)
        return [self._outcomes(question.group) for question in questions]

    def _outcomes(self, group: SimulatedGroup) -> GroupOutcomes:
        label = self._book.label(group.prompt.metadata)
        recipe = self._book.find(label)
        names = [name for name in self._names if recipe is None or name in recipe.weights]
        draw = random.Random(group.prompt.prompt_id)
        outcomes = tuple({name: Score(float(draw.random() < 0.5)) for name in names} for _ in range(group.num_siblings))
        return GroupOutcomes(label, tuple(f"#{n}" for n in range(len(outcomes))), outcomes)


def _num_references(groups: Sequence[ScoredGroup], portion: Portion | None) -> int:
    pairs = [(g.group, g.reference_logprobs) for g in groups] if portion is None else portion.references.values()
    return sum(reference is not None for pair in pairs for reference in pair)


def row_tokens(summary: GroupSummary) -> int:
    """Tokens of all rows of a group: each response with its prompt."""
    return summary.num_tokens + summary.num_prompt_tokens * summary.num_trajectories


def _metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    num_tokens = sum(group.summary.num_tokens for group in groups)
    num_responses = sum(group.summary.num_trajectories for group in groups)
    return {
        "loss": 0.0,
        "num_tokens": float(num_tokens),
        "response_length": num_tokens / max(1, num_responses),
        "optimizer_steps": 1.0,
    }
