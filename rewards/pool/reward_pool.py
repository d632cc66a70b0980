"""RewardPool: sends each group to the services, combines their outcomes to rewards, and counts failures."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mobula.cluster.errors import (
    LostObjectError,
    LostReplyError,
    RewardError,
    UnscoredGroupError,
    WorkerDiedError,
    loss_kind,
)
from mobula.cluster.records.trajectory import Answers, EndedResponse, Reward
from mobula.cluster.runtime.concurrency import run_all
from mobula.configs.schema.rewards import RewardsConfig
from mobula.rewards.components import ComponentError, RecipeBook
from mobula.rewards.contract import FailureKind, Outcome
from mobula.rewards.pool.service import RewardService
from mobula.rewards.pool.worker import GroupOutcomes, Outcomes, Question, response_digest

logger = logging.getLogger(__name__)
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
        if isinstance(error, LostReplyError):
            self.failures[FailureKind.REPLY_LOST] += 1
            return
        is_hung = loss_kind(error) == "hung"
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
        except (RewardError, LostObjectError, WorkerDiedError) as error:
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
        except UnscoredGroupError as error:
            if self._on_failure == "exclude":
                raise
            raise RewardError(f"{group_id}: {error}: fix the reward, or set rewards.on_failure=exclude") from error
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
        """Returns the outcomes of all services for the responses that are not `known`."""
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
                raise RewardError(
                    f"{trajectory_id}: reward component {error.component!r} {error.kind} ({error.reason}): "
                    "fix it, or set rewards.on_failure=exclude"
                ) from error
            return None


def _complete(by_response: Iterable[Outcomes | None]) -> list[Outcomes]:
    """Checks that every response of a group has outcomes, and returns them."""
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
