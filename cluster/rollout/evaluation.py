"""Evaluations on held-out prompts and rows, and their responses as files and contact sheets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from mobula.cluster.errors import ExcludedPromptError, RewardError
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.hub import informing
from mobula.cluster.metrics.step_records import HELD_OUT, ControlGain, EvaluationRecord, best_control
from mobula.cluster.metrics.summary import (
    bootstrap_interval,
    interval_of_mean,
    ks,
    paired_gains,
    paired_interval,
    pass_at_k,
    reflection_ratios,
)
from mobula.cluster.records.trajectory import Generated, Prompt, Reward, ScoredGroup
from mobula.cluster.replay.journal_writer import GroupJournal
from mobula.cluster.roles import Reference, Rewards, Rollouts, SamplingSettings
from mobula.cluster.rollout.dispatcher import sample_and_score
from mobula.cluster.workers.supervisor import background_tasks
from mobula.configs.schema.run import Control

OVER_CONTROL = "gain_over_best_control"
REFLECTION = "reflection"  # reward component from which the reflection ratios are computed


@dataclass(frozen=True)
class EvaluationResult:
    """The accuracy of one weight version on one suite with its 95 % interval [low, high]. With one response per prompt
    and values in [0, 1] the interval is Wilson's, else a bootstrap over prompts."""

    version: int
    accuracy: float  # mean of the accuracy component over the scored responses that have it
    low: float
    high: float
    mean_reward: float  # over all scored responses
    num_scored: int  # responses in the accuracy
    num_unscored: int
    suite: str = HELD_OUT
    values: Mapping[str, float] = field(default_factory=dict)  # pass_at_<k>, response_length, reflection ratios, gains
    by_prompt: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # prompt -> component -> mean
    identity: Mapping[str, Any] = field(default_factory=dict)  # of the suite
    measure: str = "accuracy"  # what the mean is called
    controls: tuple[ControlGain, ...] = ()  # what the policy gains over each control of the suite

    def record(self) -> EvaluationRecord:
        best = best_control(self.controls)
        over = {} if best is None else {OVER_CONTROL: best.gain}
        rest = (self.num_unscored, self.identity, self.measure, self.controls)
        means = (self.accuracy, self.low, self.high, self.num_scored)
        return EvaluationRecord(self.version, *means, self.suite, {**self.values, **over}, *rest)


@dataclass(frozen=True)
class Suite:
    """Held-out prompts and their sampling settings. Each prompt gets `settings.num_samples` responses. `identity` names
    everything on which the numbers depend, apart from the weights and seeds. A control of a suite has the same rows."""

    name: str
    prompts: Sequence[Prompt]
    settings: SamplingSettings
    identity: Mapping[str, Any] = field(default_factory=dict)
    of: str = ""  # the suite of a control
    control: str = ""

    def is_due(self, version: int, total_steps: int) -> bool:
        """Whether it belongs to an evaluation of `version`: controls are of the first and the last, `direct_prompt` of
        the first."""
        last = 0 if self.control == Control.DIRECT_PROMPT else total_steps
        return not self.control or version in (0, last)


@dataclass(frozen=True)
class ScoredPrompt:
    """One held-out prompt with the rewards of its responses; None for a response that was not scored or is too new."""

    prompt: Prompt
    rewards: Sequence[Reward | None]
    generated: Generated | None = None  # None for an excluded prompt

    @property
    def scored(self) -> list[Reward]:
        return [reward for reward in self.rewards if reward is not None]


class ResponseLog(Protocol):
    """Stores the responses of evaluations."""

    async def write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None: ...


class NoResponseLog:
    """Keeps nothing."""

    async def write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None: ...


class InformingLog:
    """Writes to another log. A write error is logged and does not end the run."""

    def __init__(self, log: ResponseLog) -> None:
        self._log = log

    async def write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None:
        with informing(f"the responses of {suite} at version {version}"):
            await self._log.write(suite, version, prompts)


class KeptResults(Protocol):
    """Keeps what controls measured of weights before training, for other runs of the same weights."""

    def find(self, suite: Suite) -> EvaluationResult | None: ...

    def keep(self, suite: Suite, result: EvaluationResult) -> None: ...


class NothingKept:
    """Keeps nothing."""

    def find(self, suite: Suite) -> EvaluationResult | None:
        return None

    def keep(self, suite: Suite, result: EvaluationResult) -> None: ...


@dataclass(frozen=True)
class ResultFiles:
    """Keeps each result in a file of `folder`; the name is a digest of `weights` and of the suite."""

    folder: Path
    weights: Any  # and how they are sampled

    def find(self, suite: Suite) -> EvaluationResult | None:
        path = self._path(suite)
        return RESULTS.validate_json(path.read_bytes())[0] if path.exists() else None

    def keep(self, suite: Suite, result: EvaluationResult) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path(suite), json.dumps([asdict(result)]))

    def _path(self, suite: Suite) -> Path:
        ids, seed = [prompt.prompt_id for prompt in suite.prompts], suite.settings.seed
        depends_on = [self.weights, suite.name, seed, suite.identity, ids]
        digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"


@dataclass(frozen=True)
class EvaluationSchedule:
    """An evaluation is due before the first step, after the last, and every `interval_steps` between (0: none)."""

    interval_steps: int
    total_steps: int

    def is_due(self, version: int) -> bool:
        is_between = self.interval_steps > 0 and version % self.interval_steps == 0
        return is_between or version in (0, self.total_steps)


@dataclass(eq=False, kw_only=True)
class Evaluator:
    """Samples every prompt of every suite, `max_concurrent` at a time, and averages the accuracy component.

    It runs during training, with a lower priority in the engines (`settings.priority`). `finish` is awaited before the
    next push, so the weights do not change during an evaluation.

    A response that could not be scored is counted and left out of the means; it does not count as wrong. The same holds
    for a response of newer weights, from an engine that joined late. A version whose results are in a checkpoint is not
    evaluated again, unless a suite has changed since.
    """

    suites: Sequence[Suite]  # the first is the run's own, `HELD_OUT`
    rollouts: Rollouts
    rewards: Rewards
    accuracy_component: str
    own_measure: str = ""  # the name of the user's function behind it
    correct_from: float  # a response with such an accuracy component is correct for pass@k
    max_concurrent: int
    schedule: EvaluationSchedule
    on_result: Callable[[EvaluationResult], None]  # gets each result once
    responses: ResponseLog = field(default_factory=NoResponseLog)
    journal: GroupJournal = field(default_factory=GroupJournal)  # keeps evaluations for a resume
    kept: KeptResults = field(default_factory=NothingKept)

    def __post_init__(self) -> None:
        self.results: dict[int, list[EvaluationResult]] = {}  # version -> one for each suite
        self._tasks: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        async with background_tasks() as self._tasks:
            yield
            await self.finish()

    async def maybe_run(self, version: int) -> None:
        """Begins to evaluate `version`, the version of the newest push, if that is due and not done. Waits for the
        evaluation of the last version, after which no step follows."""
        known = {result.suite: result.identity for result in self.results.get(version, ())}
        if not self.schedule.is_due(version) or known == {each.name: each.identity for each in self._due(version)}:
            return
        await self.finish()
        assert self._tasks is not None, "an evaluation runs within evaluating()"
        self._running = self._tasks.create_task(self._run_and_report(version), name=f"evaluate version {version}")
        if version == self.schedule.total_steps:
            await self.finish()

    async def finish(self) -> None:
        """Waits for the running evaluation, if any."""
        if self._running is not None:
            await self._running
            self._running = None

    async def _run_and_report(self, version: int) -> None:
        for result in await self.run(version, min_version=version):
            self.on_result(result)

    async def run(self, version: int, *, min_version: int = -1) -> list[EvaluationResult]:
        """Evaluates `version`. Engines answer once they serve `min_version`.

        Returns one result per suite, in order.
        """
        slots = asyncio.Semaphore(self.max_concurrent)
        due = self._due(version)
        kept = {suite.name: self.kept.find(suite) if suite.control and version == 0 else None for suite in due}
        async with background_tasks() as tasks:
            running = []
            for suite in due:
                settings = replace(suite.settings, min_version=min_version)
                prompts = suite.prompts if kept[suite.name] is None else ()
                running.append([tasks.create_task(self._score(p, settings, version, slots)) for p in prompts])
            results: list[EvaluationResult] = []
            rewards: list[list[dict[str, Any]]] = []  # of each prompt of the first suite
            for suite, prompts_of in zip(due, running, strict=True):
                if (earlier := kept[suite.name]) is not None:
                    results.append(earlier)
                    continue
                scored = [await task for task in prompts_of]
                rewards = rewards or [[asdict(reward) for reward in prompt.scored] for prompt in scored]
                await self.responses.write(suite.name, version, scored)
                results.append(self._summarise(suite, version, scored))
                if suite.control and version == 0:
                    self.kept.keep(suite, results[-1])
        results = [replace(each, controls=self._gains(each, results)) for each in results]
        await self.journal.evaluated(version, {"results": [asdict(r) for r in results], "rewards": rewards})
        self.results[version] = results
        return results

    def _due(self, version: int) -> list[Suite]:
        return [suite for suite in self.suites if suite.is_due(version, self.schedule.total_steps)]

    def _gains(self, result: EvaluationResult, results: Sequence[EvaluationResult]) -> tuple[ControlGain, ...]:
        """Compares a result with each control of its suite, at the same version or else at the first one."""
        of_control = {suite.name: suite for suite in self.suites if suite.of == result.suite}
        first = {each.suite: each for each in self.results.get(0, ()) if result.version}
        now = {each.suite: each for each in results}
        gains = []
        for name, suite in of_control.items():
            found = now.get(name) or first.get(name)
            if found is None or found.identity != suite.identity or not result.by_prompt:
                continue
            then = first.get(result.suite), first.get(name) if name in now else first.get(result.suite)
            gain = gain_over(suite.control, result, found, then, self.accuracy_component)
            gains += [] if gain is None else [gain]
        return tuple(gains)

    def state(self) -> dict[str, Any]:
        return {"results": [asdict(result) for results in self.results.values() for result in results]}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        self.results = {}
        self.repeat(state["results"])

    def repeat(self, rows: Sequence[Mapping[str, Any]]) -> list[EvaluationResult]:
        """Takes results of an earlier part of the run, as in `state`."""
        results = RESULTS.validate_python(list(rows))
        self.results |= {
            result.version: [other for other in results if other.version == result.version] for result in results
        }
        return results

    async def _score(
        self, prompt: Prompt, settings: SamplingSettings, version: int, slots: asyncio.Semaphore
    ) -> ScoredPrompt:
        async with slots:
            try:
                generated, rewards = await sample_and_score(
                    self.rollouts, self.rewards, prompt, settings, on_lost=lambda kind: None
                )
            except ExcludedPromptError:  # the rollout pool has counted and logged it
                return ScoredPrompt(prompt, [None] * settings.num_samples)
        is_newer = max(generated.summary.tokens_by_version) > version
        return ScoredPrompt(prompt, [None] * len(rewards) if is_newer else rewards, generated)

    def _summarise(self, suite: Suite, version: int, prompts: Sequence[ScoredPrompt]) -> EvaluationResult:
        rewards = [reward for prompt in prompts for reward in prompt.rewards]
        scored = [reward for reward in rewards if reward is not None]
        if not scored:
            raise RewardError(
                f"evaluation of version {version} on {suite.name}: none of {len(rewards)} responses could be scored; "
                "see the lines `has no reward` in run.log for component and reason, and check rewards.components"
            )
        accuracy, num = mean_of_component(self.accuracy_component, scored)
        is_binary = (reward.components.get(self.accuracy_component, 0.0) in (0.0, 1.0) for reward in scored)
        by_prompt: dict[str, dict[str, float]] = {}
        gains: dict[str, float] = {}  # over the suite's first evaluation
        name = self.accuracy_component
        if suite.settings.num_samples == 1:  # too noisy for gains
            values = [reward.components[name] for reward in scored if name in reward.components]
            low, high = interval_of_mean(values, suite.settings.seed)
            if version in (0, self.schedule.total_steps):  # rows that other evaluations are paired with
                by_prompt = {
                    p.prompt.prompt_id: {name: reward.components[name]}
                    for p in prompts
                    for reward in p.scored
                    if name in reward.components
                }
        else:
            by_response = [[r.components[name] for r in prompt.scored if name in r.components] for prompt in prompts]
            means = [math.fsum(of_prompt) / len(of_prompt) for of_prompt in by_response if of_prompt]
            low, high = bootstrap_interval(means, suite.settings.seed)
            by_prompt = {p.prompt.prompt_id: component_means(p.scored) for p in prompts if p.scored}
            earlier = [result for results in self.results.values() for result in results if result.suite == suite.name]
            first = next((result.by_prompt for result in earlier if result.identity == suite.identity), {})
            gains = paired_gains(first, by_prompt)
        return EvaluationResult(
            version,
            accuracy,
            low,
            high,
            math.fsum(reward.value for reward in scored) / len(scored),
            num,
            len(rewards) - len(scored),
            suite.name,
            {**self._values(suite, prompts, scored), **gains},
            by_prompt,
            suite.identity,
            self.own_measure or ("accuracy" if all(is_binary) else "score"),
        )

    def _values(self, suite: Suite, prompts: Sequence[ScoredPrompt], scored: Sequence[Reward]) -> dict[str, float]:
        """Returns the mean length, reflection ratios, and pass@k of prompts whose responses all have an accuracy."""
        name, num_samples = self.accuracy_component, suite.settings.num_samples
        correct = [
            sum(reward.components[name] >= self.correct_from for reward in prompt.scored)
            for prompt in prompts
            if sum(name in reward.components for reward in prompt.scored) == num_samples
        ]
        values = {}
        if correct:
            values = {
                f"pass_at_{k}": math.fsum(pass_at_k(num_samples, n, k) for n in correct) / len(correct)
                for k in ks(num_samples)
            }
        summaries = [prompt.generated.summary for prompt in prompts if prompt.generated is not None]
        values["response_length"] = sum(s.num_tokens for s in summaries) / sum(s.num_trajectories for s in summaries)
        values["truncated"] = sum(s.num_truncated for s in summaries) / sum(s.num_trajectories for s in summaries)
        both = [reward.components for reward in scored if {name, REFLECTION} <= reward.components.keys()]
        if both:
            values |= reflection_ratios(
                [row[name] >= self.correct_from for row in both], [row[REFLECTION] > 0 for row in both]
            )
        return values


RESULTS = TypeAdapter(list[EvaluationResult])


def gain_over(
    control: str,
    result: EvaluationResult,
    found: EvaluationResult,
    then: tuple[EvaluationResult | None, EvaluationResult | None],
    component: str,
) -> ControlGain | None:
    """Pairs a result with that of a control by row; None if they have no row in common. `then` are the policy and what
    the control began with, at the first version."""
    policy, other = values_by_row(result, component), values_by_row(found, component)
    rows = [row for row in policy if row in other]
    if not rows:
        return None
    differences = [policy[row] - other[row] for row in rows]
    begins = [values_by_row(each, component) for each in then if each is not None]
    means = [math.fsum(of[row] for row in rows) / len(rows) for of in begins if all(row in of for row in rows)]
    policy_before, before = means if len(means) == 2 else (None, None)
    accuracy, gain = math.fsum(other[row] for row in rows) / len(rows), math.fsum(differences) / len(rows)
    return ControlGain(control, accuracy, gain, *paired_interval(differences), len(rows), before, policy_before)


def values_by_row(result: EvaluationResult, component: str) -> dict[str, float]:
    """The mean of a component by prompt of the suite; prompts of other suites have the suite's name before their id."""
    prefix = f"{result.suite}:"
    return {id_.removeprefix(prefix): row[component] for id_, row in result.by_prompt.items() if component in row}


def component_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """Returns component -> mean, for the components that all rewards have."""
    names = set.intersection(*({*reward.components} for reward in rewards))
    return {name: math.fsum(r.components[name] for r in rewards) / len(rewards) for name in sorted(names)}


def mean_of_component(name: str, rewards: Sequence[Reward]) -> tuple[float, int]:
    """Returns the mean of one component over the rewards that have it, and their number: recipes may leave it out."""
    values = [reward.components[name] for reward in rewards if name in reward.components]
    if not values:
        known = sorted({component for reward in rewards for component in reward.components})
        raise RewardError(
            f"rewards.accuracy_component={name} is in no recipe of the {len(rewards)} held-out responses, whose "
            f"components are {known}: set one of these, or hold out prompts whose label has a recipe with {name}"
        )
    return math.fsum(values) / len(values), len(values)


class Assessor(Protocol):
    """The learner of an offline job."""

    async def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Returns the job's metrics on these rows with the current weights."""


@dataclass(eq=False, kw_only=True)
class RowEvaluator:
    """Implements `HeldOutEvaluator` and `Resumable`. An evaluation is a forward pass of the learner, so `maybe_run`
    waits for it. The frozen reference scores the rows once."""

    rows: Sequence[ScoredGroup]
    learner: Assessor
    reference: Reference
    schedule: EvaluationSchedule
    on_result: Callable[[int, Mapping[str, float]], None]  # gets the version and the metrics of each evaluation
    identity: Mapping[str, Any] = field(default_factory=dict)  # results with another identity are not compared

    def __post_init__(self) -> None:
        self.results: dict[int, dict[str, float]] = {}
        self._is_scored = False

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        """Does nothing: `maybe_run` evaluates in the foreground."""
        yield

    async def maybe_run(self, version: int) -> None:
        """Evaluates `version`, which the learner holds, if that is due and not done."""
        if not self.schedule.is_due(version) or version in self.results:
            return
        if not self._is_scored:
            self.rows, self._is_scored = await self.reference.score(self.rows), True
        self.results[version] = dict(await self.learner.assess(self.rows))
        self.on_result(version, self.results[version])

    async def finish(self) -> None:
        """Does nothing: no evaluation runs in the background."""

    def state(self) -> dict[str, Any]:
        results = [[version, metrics] for version, metrics in self.results.items()]
        return {"identity": self.identity, "results": results}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        """Restores the results of an earlier part of the run; results of another evaluation do not count."""
        is_same = state.get("identity", self.identity) == self.identity
        self.results = dict(state["results"]) if is_same else {}
