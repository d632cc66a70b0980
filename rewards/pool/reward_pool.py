"""RewardPool: sends each group to its services, whose workers score batches, and combines their outcomes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from mobula.cluster import errors
from mobula.cluster.records.trajectory import Answers, EndedResponse, Reward
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.ray_actors import answer
from mobula.cluster.workers.status import RestartPolicy
from mobula.cluster.workers.work_queue import Hosts, WorkerSlot, WorkQueue
from mobula.configs.schema.rewards import RewardsConfig
from mobula.rewards.components import ComponentError, RecipeBook, response_digest
from mobula.rewards.contract import FailureKind, Outcome
from mobula.rewards.pool.worker import GroupOutcomes, Outcomes, Question

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceSettings:
    """Deadlines and sizes of one service. `timeout_s` bounds one call, including the wait for earlier calls."""

    start_s: float
    alive_s: float
    timeout_s: float
    max_batch: int  # groups per call
    max_in_flight: int  # calls per worker
    max_queued: int  # groups that wait for a worker
    max_attempts: int  # lost workers or replies per group


@dataclass(eq=False)
class _Waiting:
    question: Question
    result: asyncio.Future[GroupOutcomes]
    lost: list[str] = field(default_factory=list)  # reasons of lost workers or replies


class RewardService:
    """Scores groups on `RewardWorker` actors with the same components.

    An idle worker gets all waiting groups, up to `max_batch`: batches form while workers are busy, and no group waits
    for a batch. A busy worker gets full batches only: a smaller batch would wait there and could not grow. A worker
    that died or hangs is replaced. Its unanswered groups are sent again first, each in a separate call, because one of
    them may be the cause.
    """

    def __init__(
        self,
        role: str,
        workers: Sequence[Any],
        *,
        hosts: Hosts,
        restarts: RestartPolicy,
        settings: ServiceSettings,
        on_lost: Callable[[Exception], None],
    ) -> None:
        """`on_lost` is called for every loss of a worker, and with a LostReplyError for every lost reply."""
        self._role = role
        self._settings = settings
        self._on_lost = on_lost
        self._work = WorkQueue(
            role,
            workers,
            hosts,
            max_load=settings.max_in_flight,
            restarts=restarts,
            alive_s=settings.alive_s,
            join=self._join,
            on_lost=on_lost,
            may_pile_up=self._has_full_batch,
        )
        self.pool = self._work.pool
        self._queue: deque[_Waiting] = deque()
        self._room = asyncio.Semaphore(settings.max_queued)
        self._carriers: set[asyncio.Task[None]] = set()
        self._is_waiting = False  # a carrier task waits for a worker

    async def start(self) -> None:
        """Waits until the first workers are built. Raises the errors of `WorkQueue.start`."""
        await self._work.start()

    @property
    def workers(self) -> tuple[Any, ...]:
        return self._work.handles

    async def score(self, question: Question) -> GroupOutcomes:
        """Returns the outcomes for a group. Waits for space in the queue, then for a worker."""
        async with self._room:
            waiting = _Waiting(question, asyncio.get_running_loop().create_future())
            self._queue.append(waiting)
            self._carry()
            if self._has_full_batch():
                self._work.dispatch()
            try:
                return await waiting.result
            finally:
                if waiting in self._queue:  # the caller was cancelled
                    self._queue.remove(waiting)

    async def close(self) -> None:
        for carrier in self._carriers:
            carrier.cancel()
        await asyncio.gather(*self._carriers, return_exceptions=True)
        await self.pool.close()

    def _has_full_batch(self) -> bool:
        return len(self._queue) >= self._settings.max_batch

    def _carry(self, *, is_urgent: bool = False) -> None:
        """Starts a task that waits for a worker, if a group is queued and no task waits yet."""
        if self._is_waiting or not self._queue:
            return
        self._is_waiting = True
        task = asyncio.create_task(self._carry_batch(is_urgent), name=f"{self._role} carrier")
        self._carriers.add(task)
        task.add_done_callback(self._carriers.discard)

    async def _carry_batch(self, is_urgent: bool) -> None:
        batch: list[_Waiting] = []
        try:
            async with self._work.slot(is_urgent=is_urgent) as slot:
                self._is_waiting = False
                size = min(len(self._queue), self._settings.max_batch)
                alone = next((i for i in range(size) if self._queue[i].lost), size)  # a worker was lost over it
                batch = [self._queue.popleft() for _ in range(min(size, max(1, alone)))]
                self._carry()
                if batch:
                    await self._deliver(slot, batch)
        except asyncio.CancelledError:
            _fail(batch, errors.RewardError(f"the {self._role} service was closed"))
            raise
        except Exception as error:  # no caller waits for this task: the error goes to the callers of its groups
            if self._is_waiting and not batch:  # no worker will become free again
                self._is_waiting = False
                batch = [self._queue.popleft() for _ in range(len(self._queue))]
            _fail(batch, error)

    async def _deliver(self, slot: WorkerSlot, batch: Sequence[_Waiting]) -> None:
        what = f"{slot.name} to score {len(batch)} groups (timeouts.reward_s)"
        call = slot.handle.score.remote([waiting.question for waiting in batch])
        try:
            results = await answer(call, timeout_s=self._settings.timeout_s, what=what)
        except (errors.WorkerDiedError, errors.DeadlineError, errors.StuckError) as error:
            loss = await self._work.failed(slot, error)
            if isinstance(loss, errors.LostReplyError):
                self._on_lost(loss)
            self._again(batch, loss)
        except (errors.LostObjectError, errors.RewardError) as error:
            if len(batch) == 1:
                _fail(batch, error)
            for waiting in batch if len(batch) > 1 else ():  # one of them is the cause: send each in a separate call
                await self._deliver(slot, [waiting])
        else:
            for waiting, result in zip(batch, results, strict=True):
                if not waiting.result.done():
                    waiting.result.set_result(result)

    def _again(self, batch: Sequence[_Waiting], error: Exception) -> None:
        """Queues unanswered groups first. Groups over which too many workers or replies were lost fail."""
        for waiting in reversed(batch):
            waiting.lost.append(str(error))
            if len(waiting.lost) < self._settings.max_attempts:
                self._queue.appendleft(waiting)
            else:
                who = f"{len(waiting.lost)} {self._role} workers, or their answers,"
                _fail([waiting], errors.UnscoredGroupError(f"{who} were lost over one group; last: {error}"))
        self._carry(is_urgent=True)

    async def _join(self, name: str, handle: Any) -> None:
        what = f"{name} to start (timeouts.start_s)"
        await answer(handle.ping.remote(), timeout_s=self._settings.start_s, what=what)


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    for waiting in batch:
        if not waiting.result.done():
            waiting.result.set_exception(error)


USED, UNUSED = "used", "unused"
RETRIED = "retried"  # a component failed and was run again
DIED, HUNG = "reward_died", "reward_hung"


class LossCounter:
    """Counts the `failures` of a pool. Services report lost workers and replies here."""

    def __init__(self, on_lost: Callable[[str], None] = lambda kind: None) -> None:
        """`on_lost` gets the kind of each loss of a worker."""
        self._on_lost = on_lost
        self.failures: Counter[str] = Counter(dict.fromkeys([*(kind.value for kind in FailureKind), RETRIED], 0))

    def count_loss(self, error: Exception) -> None:
        if isinstance(error, errors.LostReplyError):
            self.failures[FailureKind.REPLY_LOST] += 1
            return
        is_hung = errors.loss_kind(error) == "hung"
        self.failures[FailureKind.WORKER_HUNG if is_hung else FailureKind.WORKER_DIED] += 1
        self._on_lost(HUNG if is_hung else DIED)


@dataclass(frozen=True)
class Ahead:
    digest: bytes  # `response_digest`
    task: asyncio.Task[Outcomes | None]  # None if the workers failed


class ScoringAhead:
    """Starts to score responses when they end, and returns the outcomes when the group is complete."""

    def __init__(self, score: Callable[[EndedResponse], Awaitable[Outcomes]]) -> None:
        self._score = score
        self._begun: dict[str, dict[int, Ahead]] = {}  # prompt id -> sibling

    def begin(self, ended: EndedResponse) -> None:
        prompt_id = ended.prompt.prompt_id
        siblings = self._begun.setdefault(prompt_id, {})
        if ended.sibling in siblings:  # a restarted episode has another end
            siblings[ended.sibling].task.cancel()
        task = asyncio.create_task(self._outcomes(ended), name=f"score {prompt_id}#{ended.sibling} ahead")
        siblings[ended.sibling] = Ahead(response_digest(ended.response), task)

    @contextmanager
    def taken(self, prompt_id: str) -> Iterator[Mapping[int, Ahead]]:
        """Yields the started scores of a group by sibling. On exit they are dropped and calls in progress cancelled."""
        siblings = self._begun.pop(prompt_id, {})
        try:
            yield siblings
        finally:
            for ahead in siblings.values():
                ahead.task.cancel()

    async def close(self) -> None:
        tasks = [ahead.task for siblings in self._begun.values() for ahead in siblings.values()]
        self._begun.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcomes(self, ended: EndedResponse) -> Outcomes | None:
        """Scores a response. Failures of workers are logged here; the group is scored again and then raises them."""
        try:
            return await self._score(ended)
        except (errors.RewardError, errors.LostObjectError, errors.WorkerDiedError) as error:
            name = f"{ended.prompt.prompt_id}#{ended.sibling}"
            logger.warning("%s was not scored ahead, so it is scored with its group: %s", name, error)
            return None


class RewardPool:
    """Implements `mobula.cluster.roles.Rewards` over services, which run concurrently unless gates need an order. A
    response that could not be scored is counted in `failures` by kind and never gets a number: with
    `rewards.on_failure=exclude` its reward is None, with `stop` an error is raised."""

    def __init__(self, rewards: RewardsConfig, services: Mapping[str, RewardService], losses: LossCounter) -> None:
        """`services` maps the service names of components to services, which report to `losses`."""
        self._book = RecipeBook(rewards)
        self._stages = rewards.service_stages()
        self._on_failure = rewards.on_failure
        self._needs_images = any(component.needs_images for component in rewards.components)
        self._losses = losses
        self._ahead = ScoringAhead(self._score_ended)
        self.services = services
        self.scored_ahead: Counter[str] = Counter({USED: 0, UNUSED: 0})

    @property
    def failures(self) -> Counter[str]:
        """Failures of responses and workers by kind, since the pool was built."""
        return self._losses.failures

    async def start(self) -> None:
        await run_all(*(service.start() for service in self.services.values()))

    def score_ahead(self, ended: EndedResponse) -> None:
        """Begins to score a response before its group is complete. The outcome is used if the group contains it."""
        self._ahead.begin(ended)

    async def score(self, group: Any, group_id: str) -> tuple[Reward | None, ...]:
        """Returns one reward per trajectory, in order; None if scoring failed and `rewards.on_failure=exclude`."""
        try:
            with self._ahead.taken(group_id) as ahead:
                group = self._as_read(group)
                scored = await self._ask(group, {sibling: begun.digest for sibling, begun in ahead.items()})
                outcomes = await self._completed(group, scored, ahead)
        except errors.UnscoredGroupError as error:
            if self._on_failure == "exclude":
                raise
            raise errors.RewardError(
                f"{group_id}: {error}: fix the reward, or set rewards.on_failure=exclude"
            ) from error
        return tuple(
            self._reward(scored.label, trajectory_id, of_one)
            for trajectory_id, of_one in zip(scored.trajectory_ids, outcomes, strict=True)
        )

    async def check(self) -> None:
        """Checks all workers; workers that do not answer are replaced."""
        await asyncio.gather(*(service.pool.check() for service in self.services.values()))

    async def close(self) -> None:
        await self._ahead.close()
        await asyncio.gather(*(service.close() for service in self.services.values()))

    async def _score_ended(self, ended: EndedResponse) -> Outcomes:
        answers = self._as_read(Answers(ended.prompt, (ended.sibling,), (ended.response,)))
        (outcomes,) = (await self._ask(answers, {})).outcomes
        assert outcomes is not None, "nothing of it was known"
        return outcomes

    def _as_read(self, group: Any) -> Any:
        """Returns the group; answers by value without media that no component needs (Ray counts each reference)."""
        return group.lean(with_media=self._needs_images) if isinstance(group, Answers) else group

    async def _ask(self, group: Any, known: Mapping[int, bytes]) -> GroupOutcomes:
        by_service: list[GroupOutcomes] = []
        for stage in self._stages:
            earlier = [outcomes or {} for outcomes in _merged(by_service).outcomes] if by_service else None
            question = Question(group, earlier, known)
            asked = [self.services[name].score(question) for name in stage]
            by_service += [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked)
        self.failures[RETRIED] += sum(outcomes.num_retried for outcomes in by_service)
        return _merged(by_service)

    async def _completed(self, group: Any, scored: GroupOutcomes, ahead: Mapping[int, Ahead]) -> list[Outcomes]:
        """Completes `scored` with outcomes that were scored ahead; scores responses again if their workers failed."""
        if not ahead:
            return _complete(scored.outcomes)
        ahead_outcomes = {i: await ahead[i].task for i, outcomes in enumerate(scored.outcomes) if outcomes is None}
        used = {i: outcomes for i, outcomes in ahead_outcomes.items() if outcomes is not None}
        self.scored_ahead.update({USED: len(used), UNUSED: len(ahead) - len(used)})
        again = scored
        if len(used) < len(ahead_outcomes):
            again = await self._ask(group, {i: begun.digest for i, begun in ahead.items() if i in used})
        return _complete(used.get(i, outcomes) for i, outcomes in enumerate(again.outcomes))

    def _reward(self, label: str, trajectory_id: str, outcomes: Mapping[str, Outcome]) -> Reward | None:
        for name, failure in self._book.judge_failures(outcomes).items():
            self.failures[failure.kind] += 1
            logger.warning("%s is not judged: %s %s: %s", trajectory_id, name, failure.kind, failure.reason)
        try:
            return self._book.reward(label, outcomes)
        except ComponentError as error:
            self.failures[error.kind] += 1
            logger.warning("%s has no reward: %s %s: %s", trajectory_id, error.component, error.kind, error.reason)
            if self._on_failure == "stop":
                raise errors.RewardError(
                    f"{trajectory_id}: reward component {error.component!r} {error.kind} ({error.reason}): "
                    "fix it, or set rewards.on_failure=exclude"
                ) from error
            return None


def _complete(by_response: Iterable[Outcomes | None]) -> list[Outcomes]:
    complete: list[Outcomes] = []
    for outcomes in by_response:
        assert outcomes is not None, "a response has no outcomes"
        complete.append(outcomes)
    return complete


def _merged(parts: Sequence[GroupOutcomes]) -> GroupOutcomes:
    """Merges the outcomes of all services for each response; a response is known to all services or to none."""
    if len(parts) == 1:
        return parts[0]
    whole = [
        None if None in of_one else {name: outcome for outcomes in of_one for name, outcome in outcomes.items()}
        for of_one in zip(*(part.outcomes for part in parts), strict=True)
    ]
    return replace(parts[0], outcomes=tuple(whole))
