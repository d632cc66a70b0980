"""RolloutDispatcher: starts, retries and completes groups."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar

from mobula.cluster import errors
from mobula.cluster.failures import in_one_line
from mobula.cluster.records.trajectory import Generated, GroupOutcome, GroupSummary, Prompt, Reward, ScoredGroup
from mobula.cluster.replay.buffer import ReplayBuffer
from mobula.cluster.replay.journal import JournalRecord
from mobula.cluster.roles import Prompts, Rewards, Rollouts, SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequests, PromptPrefetcher
from mobula.cluster.rollout.staleness import Admission, AgeLimit, StalenessGate, StepOrder
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer, Stage
from mobula.cluster.workers.supervisor import background_tasks

_logger = logging.getLogger(__name__)


class RepeatedEvents:
    """Logs equal events as one line, `window_s` after the first of them, such as "64 prompts failed and are retried: no
    output (first: prompt 0/3/s3)". Needs a running event loop."""

    def __init__(self, logger: logging.Logger, window_s: float) -> None:
        self._logger = logger
        self._window_s = window_s
        self._subjects: dict[str, list[str]] = {}  # by event

    def note(self, event: str, subject: str, plural: str) -> None:
        """Counts `event` of `subject`; `plural` names its kind in the log line."""
        if event not in self._subjects:
            self._subjects[event] = []
            asyncio.get_running_loop().call_later(self._window_s, self._write, event, plural)
        self._subjects[event].append(subject)

    def _write(self, event: str, plural: str) -> None:
        subjects = self._subjects.pop(event)
        self._logger.warning("%d %s %s (first: %s)", len(subjects), plural, event, subjects[0])


# RolloutDispatcher: prompt -> gate -> rollout actor -> rewards -> replay, many groups at once.
#
# It tracks every prompt in flight until the prompt is trained or rejected; checkpoints keep the pending prompts.

Result = TypeVar("Result")
TOO_FEW_SCORED = "too_few_scored"
UNIFORM = "uniform"
OVER_AGE = "over_age"
ROLLED_BACK = "rolled_back"
UNUSABLE = "unusable"  # a pending row of a checkpoint that can no longer be read
LOST_TOGETHER_S = 1.0  # actors that die within this time count as one failure of a prompt: their node is gone
LOG_WINDOW_S = 1.0  # failures of prompts with one cause within this time are one line of the log
MAX_NODES_LOST = 8  # in a row, for one prompt or one step
MAX_PREFETCHED = 32  # prompts that are prepared before a slot is free


@dataclass(frozen=True)
class AdmissionFilter:
    """Rejects finished groups that give no learning signal. A policy may become so good or so bad that every group is
    rejected; `max_rejected_in_a_row` ends such a run."""

    min_scored: int  # siblings with a reward: 2 if the advantage compares siblings, else 1
    drop_uniform: bool
    max_rejected_in_a_row: int
    accuracy_component: str | None = None  # groups with equal values of it are uniform, too; None: only equal rewards

    def reason_to_reject(self, rewards: Sequence[Reward]) -> str | None:
        """Returns why a group with these rewards of its scored siblings is rejected; None if it is kept."""
        if len(rewards) < self.min_scored:
            return TOO_FEW_SCORED
        if not self.drop_uniform:
            return None
        name = self.accuracy_component
        marks = {reward.components.get(name, reward.value) if name else reward.value for reward in rewards}
        is_uniform = len(marks) == 1 or len({reward.value for reward in rewards}) == 1
        return UNIFORM if is_uniform else None


@dataclass(eq=False)
class RetryingRollouts:
    """Rollouts that retry a failed prompt, on any actor.

    The in-flight request of the prompt is held over all tries, so that each try continues from the received tokens. The
    pool logs the loss of an engine once; other failures of one cause within `LOG_WINDOW_S` are one line of the log.
    """

    RETRIED = (
        errors.RolloutError,
        errors.WorkerDiedError,
        errors.DeadlineError,
        errors.LostReplyError,
        errors.DependencyError,
    )

    rollouts: Rollouts
    in_flight_requests: InFlightRequests
    _: KW_ONLY
    max_retries: int
    on_retry: Callable[[str], None]  # gets the kind of each failure that is retried
    on_sampled: Callable[[GroupSummary], None] = lambda summary: None  # gets the summary of each group

    def __post_init__(self) -> None:
        self._log = RepeatedEvents(_logger, LOG_WINDOW_S)

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        with self.in_flight_requests.held(prompt, settings):
            generated = await self.retried(prompt, lambda: self.rollouts.generate(prompt, settings))
        self.on_sampled(generated.summary)
        return generated

    async def retried(self, prompt: Prompt, work: Callable[[], Awaitable[Result]]) -> Result:
        """Awaits `work` for a prompt until it succeeds."""
        num_failed, last_death_s = 0, -math.inf
        while True:
            try:
                return await work()
            except errors.EngineDiedError as error:
                # Not counted for this prompt: others shared the engine. The pool bounds such losses.
                self.on_retry(type(error).__name__)
            except self.RETRIED as error:
                # A retry may go to an actor of the same node before the pool knows of its death.
                now = asyncio.get_running_loop().time()
                is_repeated = isinstance(error, errors.WorkerDiedError) and now - last_death_s < LOST_TOGETHER_S
                last_death_s = now if isinstance(error, errors.WorkerDiedError) else last_death_s
                num_failed += 0 if is_repeated else 1
                if num_failed > self.max_retries:
                    raise errors.RolloutError(
                        f"prompt {prompt.prompt_id} (sample {prompt.sample_id}) failed {num_failed} times, last with "
                        f"{type(error).__name__}: {error}; take the sample out of the data, or raise "
                        f"max_rollout_retries={self.max_retries} if the actors were at fault"
                    ) from error
                self.on_retry(type(error).__name__)
                if not isinstance(error, errors.WorkerDiedError):
                    cause = f"{type(error).__name__}: {in_one_line(error)}".replace(prompt.prompt_id, "...")
                    self._log.note(f"failed and are retried: {cause}", f"prompt {prompt.prompt_id}", "prompts")


async def sample_and_score(
    rollouts: Rollouts,
    rewards: Rewards,
    prompt: Prompt,
    settings: SamplingSettings,
    *,
    on_lost: Callable[[str], None],
    tracer: RunTracer = UNTRACED,
) -> tuple[Generated, Sequence[Reward | None]]:
    """Samples a group of `prompt` and scores it. A group that cannot be scored has no rewards. A group that is lost
    with its node before it is scored is sampled again; `on_lost` is called for each loss."""
    for _ in range(MAX_NODES_LOST):
        with tracer.sampling(prompt.prompt_id) as attributes:
            generated = await rollouts.generate(prompt, settings)
            summary = generated.summary
            attributes |= {"tokens": summary.num_tokens, "responses": summary.num_trajectories}
        try:
            with tracer.span([prompt.prompt_id], Stage.SCORED) as attributes:
                scored = await rewards.score(generated.to_score, prompt.prompt_id)
                attributes["unscored"] = sum(reward is None for reward in scored)
            return generated, scored
        except errors.UnscoredGroupError as error:
            _logger.warning("prompt %s has no reward: %s", prompt.prompt_id, error)
            return generated, [None] * generated.summary.num_trajectories
        except errors.LostObjectError as error:
            _logger.warning("prompt %s is sampled again: %s", prompt.prompt_id, error)
            on_lost(type(error).__name__)
    raise errors.RolloutError(
        f"prompt {prompt.prompt_id} was sampled {MAX_NODES_LOST} times, and each group was lost with its node before "
        "it was scored: find out why nodes are lost, then go on with resume=auto"
    )


class GroupObserver:
    """Learns from the groups of training prompts. A resume shows it the groups of the journal in the same way as fresh
    ones; each group is shown once."""

    def finished(self, outcome: GroupOutcome) -> None:
        """Called when a group is scored."""

    def rejected(self, outcome: GroupOutcome, reason: str) -> None:
        """Called when a prompt is rejected, before or after `finished`, or without it."""

    def advanced(self) -> None:
        """Called when the next version is announced, before prompts are handed out for it."""


class PromptObserver:
    """Gets what becomes of each prompt, apart from trained groups."""

    def handed_out(self, prompt_id: str) -> None: ...

    def left_out(self, prompt_id: str, reason: str) -> None:
        """A prompt cannot be sampled, or its group is rejected."""

    def continued(self, pending: Sequence[str], settled: Sequence[str]) -> None:
        """After a resume: prompts that are neither trained nor rejected, and prompts that the journal settled."""


@dataclass(eq=False, kw_only=True)
class RolloutDispatcher:
    """Keeps as many groups in flight as the gate admits, and puts the kept groups into the replay buffer step by step.
    The publisher of weights calls `advance` before each push if engines respect `min_version`, else after it."""

    prompts: Prompts
    gate: StalenessGate
    rollouts: Rollouts
    rewards: Rewards
    replay: ReplayBuffer
    settings: SamplingSettings  # with the run's seed, from which that of each prompt is derived
    admission_filter: AdmissionFilter
    order: StepOrder[ScoredGroup] | None = None  # None: a `StepOrder`
    age_limit: AgeLimit | None = None  # None: the gate's `max_staleness`
    on_lost: Callable[[str], None] = lambda kind: None  # gets the kind of each loss of an unscored group
    group_observers: Sequence[GroupObserver] = ()
    prefetches: bool = True  # else a prompt is chosen when it is handed out
    observer: PromptObserver = field(default_factory=PromptObserver)
    tracer: RunTracer = UNTRACED

    def __post_init__(self) -> None:
        self._order = self.order or StepOrder[ScoredGroup](self.gate)
        self._age_limit = self.age_limit or AgeLimit(self.gate.max_staleness)
        self._cursor = self.prompts.cursor
        self._pending: dict[str, None] = {}  # prompt ids, in order of hand-out
        self._again: dict[str, int] = {}  # pending prompts that are sampled first after a resume -> their number
        self._steps: dict[int, list[str]] = {}  # step -> prompt ids put into the buffer for it
        self._putting = asyncio.Lock()
        self._shown: set[str] = set()  # pending prompts whose groups the observers know
        self._num_rejected_in_a_row = 0
        self._oldest_version = 0  # groups with tokens of earlier versions are rejected

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """Produces groups while the body runs."""
        async with background_tasks() as tasks:
            tasks.create_task(self._put_complete_steps(), name="put steps that were complete before a resume")
            num_prefetched = min(self.gate.prompts_per_step, MAX_PREFETCHED) if self.prefetches else 0
            prefetcher = PromptPrefetcher(self.prompts, num_prefetched)
            tasks.create_task(prefetcher.prepare(), name="prepare prompts")
            tasks.create_task(self._produce(prefetcher, tasks), name="hand out prompts")
            yield

    def advance(self, version: int) -> None:
        """Called with each push: forgets the trained steps before `version` and frees their slots. Prompts that are
        handed out during the push wait at the engines for its end."""
        for step in [s for s in self._steps if s < version]:
            for prompt_id in self._steps.pop(step):
                del self._pending[prompt_id]
                self._shown.discard(prompt_id)
        if version > self.gate.version:  # else a resume has shown it
            self.advanced()
        self.gate.advance(version)

    def advanced(self) -> None:
        """Shows the observers that a version was made: at its announcement, or by a step that a resume repeats."""
        for observer in self.group_observers:
            observer.advanced()

    def show(self, arrivals: Iterable[JournalRecord]) -> None:
        """Shows the observers the groups of the journal that the restored checkpoint does not know, in order. Prompts
        up to the last of them were handed out, where the observers left them open."""
        arrivals = [arrival for arrival in arrivals if self.is_open(arrival.group_id)]
        self._hand_out({arrival.group_id for arrival in arrivals})
        for arrival in arrivals:
            self._show(arrival.outcome(), arrival.reason)

    def reject_before(self, version: int) -> None:
        """Rejects groups with tokens of versions before `version`, whose weights were rolled back. Groups of steps that
        are complete in the buffer are still trained."""
        self._oldest_version = version

    def pending(self) -> tuple[str, ...]:
        """Ids of the prompts that were handed out and neither trained nor rejected, in the order of hand-out."""
        return tuple(self._pending)

    def state(self) -> dict[str, Any]:
        counted = {"shown": sorted(self._shown), "rejected_in_a_row": self._num_rejected_in_a_row}
        return {"cursor": self._cursor, "pending": list(self._pending), **counted}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        """Restores the state of the checkpoint of `version`. Its pending prompts are sampled again, first."""
        self._cursor = state["cursor"]
        self._pending = dict.fromkeys(state["pending"])
        self._shown = set(state.get("shown", ()))  # older checkpoints have neither
        self._num_rejected_in_a_row = state.get("rejected_in_a_row", 0)
        self.observer.continued(self.pending(), ())
        self._begin(version, [])

    def is_open(self, prompt_id: str) -> bool:
        """Whether a prompt may still be trained on, according to the restored checkpoint."""
        return prompt_id in self._pending or self.prompts.index_of(prompt_id) >= self._cursor

    def catch_up(self, version: int, settled: Iterable[str], finished: Sequence[ScoredGroup]) -> None:
        """Continues from `version`, which the journal reached from the restored checkpoint.

        `settled` prompts were trained or rejected since the checkpoint. `finished` groups count as accepted and are not
        sampled again. All other prompts up to the last one in the journal are pending.
        """
        settled = set(settled)
        self._hand_out({*settled, *(group.summary.group_id for group in finished)})
        self._pending = dict.fromkeys(prompt_id for prompt_id in self._pending if prompt_id not in settled)
        self._shown &= self._pending.keys()
        self.observer.continued(self.pending(), sorted(settled))
        self._begin(version, finished)

    def _hand_out(self, prompt_ids: Set[str]) -> None:
        """Makes the prompts up to the last one of these pending, as far as their rows are open."""
        indices = {self.prompts.index_of(prompt_id) for prompt_id in prompt_ids}
        new = range(self._cursor, max([self._cursor, *(index + 1 for index in indices)]))
        handed_out = [index for index in new if index in indices or self.prompts.is_open(index)]
        self._pending |= dict.fromkeys(self.prompts.id_at(index) for index in handed_out)
        self._cursor = new.stop

    def _show(self, outcome: GroupOutcome, reason: str | None) -> None:
        is_new = outcome.group_id not in self._shown and outcome.num_responses > 0
        if is_new:
            self._shown.add(outcome.group_id)
            self._num_rejected_in_a_row = 0 if reason is None else self._num_rejected_in_a_row + 1
        for observer in self.group_observers:
            if is_new:
                observer.finished(outcome)
            if reason is not None:
                observer.rejected(outcome, reason)

    def _begin(self, version: int, finished: Sequence[ScoredGroup]) -> None:
        """Begins at `version`: accepts the `finished` groups, and hands out the other pending prompts first."""
        # Numbered in the order of the first hand-out, so that steps consist of the same prompts as before.
        numbers = {prompt_id: number for number, prompt_id in enumerate(self._pending)}
        self.gate.resume(version, num_finished=len(finished), num_started=len(numbers))
        self._order.resume(version)
        for group in finished:
            number = numbers.pop(group.summary.group_id)
            self._order.add(Admission(group.summary.oldest_version, number), group)
        self._again = numbers
        self.prompts.restore(self._cursor, list(numbers))

    async def _produce(self, prefetcher: PromptPrefetcher, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self.gate.wait_for_slot()
            prompt, self._cursor = await prefetcher.next()
            self._pending[prompt.prompt_id] = None
            self.observer.handed_out(prompt.prompt_id)
            admission = self.gate.start(self._number_of(prompt.prompt_id))
            tasks.create_task(self._roll_out(prompt, admission), name=f"roll out {prompt.prompt_id}")

    def _number_of(self, prompt_id: str) -> int | None:
        """Returns the number that a prompt had before a resume; None for a new prompt."""
        while self._again:
            first = next(iter(self._again))
            number = self._again.pop(first)
            if first == prompt_id:
                return number
            del self._pending[first]  # the source skipped this row: it is unusable now
            self.observer.left_out(first, UNUSABLE)
        return None

    async def sample_again(self, prompt_id: str) -> ScoredGroup:
        """Samples a prompt again whose accepted group was lost. The new group is not filtered."""
        prompt = await asyncio.to_thread(self.prompts.prompt_at, self.prompts.index_of(prompt_id))
        return await self._scored(prompt, self.settings.min_version)

    async def _roll_out(self, prompt: Prompt, admission: Admission) -> None:
        try:
            group = await self._scored(prompt, admission.version)
        except errors.ExcludedPromptError as error:
            outcome = GroupOutcome(prompt.prompt_id)
            self.gate.reject(admission)
            self._show(outcome, error.reason)
            await self._forget(outcome, error.reason)
            return
        reason = self._reason_to_drop(group) or self.admission_filter.reason_to_reject(group.scored_rewards)
        if reason is None:
            self._show(group.outcome, None)
            await self.replay.reserve(group)  # the group keeps its slot until the buffer has room: back-pressure
            self.gate.accept(admission)
            version = min(admission.version, group.summary.oldest_version)  # tokens kept over a fault may be older
            self._order.add(replace(admission, version=version), group)
        else:
            await self._reject(group, admission, reason)
        await self._put_complete_steps()

    async def _scored(self, prompt: Prompt, min_version: int) -> ScoredGroup:
        settings = replace(self.settings.for_prompt(prompt.prompt_id), min_version=min_version)
        generated, rewards = await sample_and_score(
            self.rollouts, self.rewards, prompt, settings, on_lost=self.on_lost, tracer=self.tracer
        )
        summary = generated.summary
        if len(rewards) != summary.num_trajectories:
            raise errors.RewardError(
                f"group {prompt.prompt_id} has {summary.num_trajectories} trajectories and got {len(rewards)} "
                "rewards: a reward pool returns one entry per trajectory, None where scoring failed"
            )
        return ScoredGroup(summary, generated.group, tuple(rewards))

    def _reason_to_drop(self, group: ScoredGroup) -> str | None:
        """Returns a reason if tokens were rolled back, or all are too old for the next step to be filled."""
        if group.summary.oldest_version < self._oldest_version:
            return ROLLED_BACK
        is_over_age = self._age_limit.drops(group.summary.tokens_by_version, self._order.next_step)
        return OVER_AGE if is_over_age else None

    async def _reject(self, group: ScoredGroup, admission: Admission, reason: str) -> None:
        self._show(group.outcome, reason)
        if self._num_rejected_in_a_row >= self.admission_filter.max_rejected_in_a_row:
            raise errors.RolloutError(
                f"{self._num_rejected_in_a_row} groups in a row were rejected, the last one ({group.summary.group_id}) "
                f"as {reason!r}, so no step can be filled; for 'uniform' the task is solved or out of reach: end the "
                "run, change the data, or set algorithm.drop_uniform_groups=false (algorithm.uniform_by=reward keeps "
                "groups whose rewards differ for other reasons than accuracy)"
            )
        self.gate.reject(admission)
        await self._forget(group.outcome, reason)

    async def _forget(self, outcome: GroupOutcome, reason: str) -> None:
        del self._pending[outcome.group_id]
        self._shown.discard(outcome.group_id)
        self.observer.left_out(outcome.group_id, reason)
        await self.replay.reject(outcome, reason)

    async def _put_complete_steps(self) -> None:
        # One task at a time: `_next_step` and `put` await, and steps must enter the buffer in their order.
        async with self._putting:
            step = self._order.next_step
            while groups := await self._next_step():
                self._steps[step] = [group.summary.group_id for group in groups]
                await self.replay.put(groups)
                step += 1

    async def _next_step(self) -> list[ScoredGroup]:
        """Drops over-age groups and returns the groups of the next step, or none while it is not complete."""
        for group in self._order.remove(lambda each: bool(self._reason_to_drop(each)), below=self._oldest_version):
            reason = self._reason_to_drop(group)
            assert reason is not None, "the order removes groups for a reason"
            self.gate.drop()
            self._show(group.outcome, reason)
            await self._forget(group.outcome, reason)
        return self._order.pop_step()
