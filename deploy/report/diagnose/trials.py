"""Trials of `mobula diagnose --deep`: short trainings on data of the run, with its learner and no rollout actor."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mobula.deploy.data.replay import VERSION_ZERO, learner_place  # isort: skip  (sets what ray reads when imported)

import numpy as np
import ray

from mobula.cluster.errors import SkippedSample
from mobula.cluster.metrics.report.run_folder import Evidence, RunFinding, RunVerdict
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import Prompt, ScoredGroup, Trajectory
from mobula.cluster.replay.buffer import LiveGroups
from mobula.cluster.runtime.object_store import fetch
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import run_lock
from mobula.deploy.preflight.findings import refusing
from mobula.deploy.report.diagnose.material import not_measured
from mobula.deploy.wiring.persistence import trajectory_log
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.roles import learner_group, supervised_rows
from mobula.deploy.wiring.spawner import Spawner
from mobula.learner.learner_group import LearnerGroup

SPREAD_FLOOR = 1e-6


@dataclass(frozen=True)
class TrialGroup:
    """A recorded group: as the learner takes it, and its prompt and trajectories by value."""

    scored: ScoredGroup
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def advantages(self) -> np.ndarray:
        """float64 [N]: rewards less their mean, divided by their standard deviation; 0 without a reward."""
        values = np.array([np.nan if reward is None else reward.value for reward in self.scored.rewards])
        spread = np.nanstd(values)
        return np.nan_to_num((values - np.nanmean(values)) / max(float(spread), SPREAD_FLOOR))

    @property
    def is_uniform(self) -> bool:
        return len({reward.value for reward in self.scored.scored_rewards}) < 2

    @property
    def best(self) -> int:
        return int(np.argmax(self.advantages))


async def response_logprob(learner: LearnerGroup, prompt: Prompt, trajectory: Trajectory) -> float:
    """Returns the mean log-prob of the tokens of a response after `prompt`, at temperature 1."""
    actions = trajectory.actions
    assert isinstance(actions, TokenActions), "trials score tokens"
    ids = [np.concatenate([ids, actions.token_ids]) for ids in (prompt.compact_ids, prompt.expanded_ids)]
    whole = replace(prompt, compact_ids=ids[0], expanded_ids=ids[1])
    logprobs = await learner.sequence_logprobs(whole)
    return float(logprobs[-actions.num_steps :].mean())


MEMORISE_NAME = "memorise_one_prompt"
NUM_CANDIDATES = 8
MEMORISE_NUM_UPDATES = 16
ENOUGH = 0.1  # nat a token


async def memorise(learner: LearnerGroup, groups: Sequence[TrialGroup]) -> RunFinding:
    """Trains `NUM_UPDATES` steps on one group: of the first whose rewards differ, the one with the least likely best
    response."""
    mixed = [group for group in groups if not group.is_uniform][:NUM_CANDIDATES]
    if not mixed:
        return not_measured(MEMORISE_NAME, f"the rewards of each of {len(groups)} recorded groups are equal")
    logprobs = [await response_logprob(learner, group.prompt, group.trajectories[group.best]) for group in mixed]
    before, chosen = min(zip(logprobs, mixed, strict=True), key=lambda pair: pair[0])
    best = chosen.trajectories[chosen.best]
    if before > -ENOUGH:
        return not_measured(
            MEMORISE_NAME,
            f"the best response of each of {len(mixed)} recorded groups is likely: at least {math.exp(before):.1%}",
        )
    for _ in range(MEMORISE_NUM_UPDATES):
        await learner.update([chosen.scored])
    after = await response_logprob(learner, chosen.prompt, best)
    gain = after - before
    numbers = {"before": before, "after": after, "gain": gain}
    measured = (
        f"{MEMORISE_NUM_UPDATES} updates on one group change the log-prob of its best response "
        f"from {before:.3g} to {after:.3g} "
        f"nat a token (probability {math.exp(before):.1%} to {math.exp(after):.1%})"
    )
    evidence = (Evidence(f"{chosen.prompt.sample_id}: {best.response.text[-200:]!r}"),)
    if gain >= ENOUGH or after > -ENOUGH:
        return RunFinding(MEMORISE_NAME, RunVerdict.OK, measured, numbers, "", evidence)
    if gain < -ENOUGH:
        action = "updates make the best response less likely: check the sign of the loss and learner.learning_rate"
        return RunFinding(MEMORISE_NAME, RunVerdict.FAULT, measured, numbers, action, evidence)
    action = "raise learner.learning_rate; check policy.freeze, algorithm.kl.coef and the loss"
    return RunFinding(MEMORISE_NAME, RunVerdict.WARNING, measured, numbers, action, evidence)


PICTURES_NAME = "picture_ablation"
MAX_PAIRS, MIN_PAIRS = 24, 8
SURE = 3.0  # standard errors
NUM_SHOWN = 3  # pairs in the evidence
FETCH_S = 30.0


async def ablate_pictures(learner: LearnerGroup, groups: Sequence[TrialGroup]) -> RunFinding:
    """Compares the log-prob of each group's best response with its own pictures and with those of another prompt."""
    pairs = list(_pairs(groups))[:MAX_PAIRS]
    if len(pairs) < MIN_PAIRS:
        return not_measured(PICTURES_NAME, f"{len(pairs)} of {MIN_PAIRS} pairs of prompts have pictures of equal size")
    drops: list[float] = []
    shown: list[Evidence] = []
    for group, swapped in pairs:
        best = group.trajectories[group.best]
        own = await response_logprob(learner, group.prompt, best)
        drops.append(own - await response_logprob(learner, swapped, best))
        if len(shown) < NUM_SHOWN:
            text = (
                f"{group.prompt.sample_id}: own picture, then the one of another prompt; {drops[-1]:+.3g} nat a token"
            )
            shown.append(Evidence(text, pngs=(*_thumbnails(group.prompt), *_thumbnails(swapped))))
    drop, error = float(np.mean(drops)), float(np.std(drops, ddof=1) / math.sqrt(len(drops)))
    numbers = {"drop": drop, "error": error, "num_prompts": float(len(drops))}
    measured = (
        f"with the pictures of another prompt the log-prob of the best responses falls by {drop:.3g} ± {error:.2g} nat "
        f"a token ({len(drops)} prompts)"
    )
    if drop > SURE * error:
        return RunFinding(PICTURES_NAME, RunVerdict.OK, measured, numbers)
    action = (
        "the policy does not look at the pictures: check that pictures belong to their rows (`mobula data inspect`), "
        "the chat template, policy.freeze (vision, connector), and data.max_pixels"
    )
    return RunFinding(PICTURES_NAME, RunVerdict.WARNING, measured, numbers, action, tuple(shown))


def _thumbnails(prompt: Prompt) -> list[bytes]:
    references = [handle.reference for handle in prompt.media if handle.reference is not None]
    media = fetch(references, timeout_s=FETCH_S, what=f"the pictures of {prompt.sample_id}")
    return [each.thumbnail for each in media if each.thumbnail]


def _pairs(groups: Sequence[TrialGroup]) -> Iterator[tuple[TrialGroup, Prompt]]:
    """Yields groups with a right response, each with its prompt with the pictures of the next one of another label."""
    right = [group for group in groups if group.prompt.media and max(group.advantages, default=0) >= 0]
    for index, group in enumerate(right):
        for other in right[index + 1 :] + right[:index]:
            shown, swapped = group.prompt, other.prompt
            if (
                shown.media_spans == swapped.media_spans
                and [handle.num_bytes for handle in shown.media] == [handle.num_bytes for handle in swapped.media]
                and shown.media != swapped.media
                and shown.references != swapped.references
            ):
                yield group, replace(shown, media=swapped.media)
                break


RATES_NAME = "learning_rate_scan"
FACTORS = (0.1, 1.0, 10.0)
MIN_GROUPS, NUM_HELD_OUT = 8, 8
RATES_NUM_UPDATES = 4
FAR = 10.0
Start = Callable[[float], Awaitable[LearnerGroup]]
"""Starts a learner whose learning rate is the configured one times a factor."""


async def gain(learner: LearnerGroup, groups: Sequence[TrialGroup]) -> tuple[float, float]:
    """Returns the gain of `NUM_UPDATES` steps on one half of the groups for the other half, and its standard error.

    The gain of a group is the mean of advantage times change of the log-prob of its responses, in nat a token: the
    first-order change of its reward, in standard deviations.
    """
    held_out, trained = groups[:NUM_HELD_OUT], groups[NUM_HELD_OUT:]
    before = [await _logprobs(learner, group) for group in held_out]
    for _ in range(RATES_NUM_UPDATES):
        await learner.update([group.scored for group in trained])
    gains = [
        float(np.mean(group.advantages * (await _logprobs(learner, group) - old)))
        for group, old in zip(held_out, before, strict=True)
    ]
    return float(np.mean(gains)), float(np.std(gains, ddof=1) / math.sqrt(len(gains)))


async def _logprobs(learner: LearnerGroup, group: TrialGroup) -> np.ndarray:
    """Returns float64 [N]: the mean log-prob of each response, in nat a token."""
    return np.array([await response_logprob(learner, group.prompt, each) for each in group.trajectories])


async def scan(start: Start, groups: Sequence[TrialGroup], state: Path) -> RunFinding:
    """Measures the gain at some multiples of `learner.learning_rate`, each from the same state."""
    useful = [group for group in groups if not group.is_uniform]
    if len(useful) < NUM_HELD_OUT + MIN_GROUPS:
        return not_measured(RATES_NAME, f"{len(useful)} of {NUM_HELD_OUT + MIN_GROUPS} groups have different rewards")
    found: dict[float, tuple[float, float]] = {}
    for factor in FACTORS:
        learner = await start(factor)
        await learner.load(state)
        found[factor] = await gain(learner, useful)
    return judged(found)


def judged(found: Mapping[float, tuple[float, float]]) -> RunFinding:
    """Returns the finding on factor -> (gain, standard error)."""
    numbers = {f"gain_x{factor:g}": value for factor, (value, _) in found.items()}
    shown = ", ".join(f"x{factor:g}: {value:+.3g} ± {error:.2g}" for factor, (value, error) in found.items())
    measured = f"gain on groups that were not trained, in nat a token, by the factor of the learning rate: {shown}"
    own, error = found[1.0]
    best = max(found, key=lambda factor: found[factor][0])
    best_gain, best_error = found[best]
    is_sure = best_gain - own > 2 * math.hypot(error, best_error)
    if best == 1.0 or not is_sure or best_gain < FAR * max(own, 0.0) and best > 1:
        return RunFinding(RATES_NAME, RunVerdict.OK, measured, numbers)
    action = f"try learner.learning_rate times {best:g}"
    return RunFinding(RATES_NAME, RunVerdict.WARNING, measured, numbers, action)


NAMES = (MEMORISE_NAME, PICTURES_NAME, RATES_NAME)
NUM_GROUPS = 64  # of the first, and of the newest recorded steps


def run_trials(folder: Path | None, config: RunConfig) -> list[RunFinding]:
    """Returns the findings of the trials; a trial that this run cannot have is `not measured`."""
    reason = _missing(folder, config)
    if reason or folder is None:
        return [not_measured(name, reason) for name in NAMES]
    # Without a warm-up: a trial takes a few steps only.
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"warmup_steps": 0})})
    with run_lock(folder):
        prepared = prepare(config, ray.put)
        assert isinstance(prepared, Prepared), "offline jobs keep no log"
        with learner_place(config) as spawner:
            return asyncio.run(Trials(folder, prepared, spawner).run())


def _missing(folder: Path | None, config: RunConfig) -> str:
    if folder is None:
        return "trials need the recorded groups of a run"
    if config.sampler.makes_images or config.environment.is_on:
        return "trials score answers in text, without an environment"
    if not trajectory_log(folder, config).steps():
        return "the run has no recorded step: run with replay.trajectory_log=true"
    if not (folder / VERSION_ZERO).is_dir():
        return f"{folder / VERSION_ZERO} is missing"
    return ""


class Trials:
    """The trials of one run: each starts with the learner's state of version 0 or of the newest checkpoint."""

    def __init__(self, folder: Path, prepared: Prepared, spawner: Spawner) -> None:
        self._folder = folder
        self._prepared = prepared
        self._spawner = spawner
        self._log = trajectory_log(folder, prepared.config)
        self._live = LiveGroups(prepared.source(), ray.put)
        self._learner: LearnerGroup | None = None

    async def run(self) -> list[RunFinding]:
        steps = self._log.steps()
        first = await asyncio.to_thread(self._groups, steps)
        newest = await asyncio.to_thread(self._groups, steps[::-1])
        zero = self._folder / VERSION_ZERO / "learner"
        try:
            learner = await self._start(1.0)
            states = sorted((self._folder / VERSION_ZERO).parent.glob("step-*/learner"))
            await learner.load(states[-1])
            found = [await ablate_pictures(learner, newest)]
            await learner.load(zero)
            found.append(await memorise(learner, first))
            found.append(await scan(self._start, first, zero))
        finally:
            if self._learner is not None:
                await self._learner.close()
        return found

    async def _start(self, factor: float) -> LearnerGroup:
        """Starts a learner with the learning rate times `factor`; the one before it is closed."""
        if self._learner is not None:
            await self._learner.close()
        config = self._prepared.config
        rate = {"learning_rate": config.learner.learning_rate * factor}
        changed = config.model_copy(update={"learner": config.learner.model_copy(update=rate)})
        prepared = replace(self._prepared, config=changed)
        self._learner = learner_group(prepared, self._spawner, supervised_rows(prepared))
        with refusing():  # the configuration may not fit the model
            await self._learner.start()
        return self._learner

    def _groups(self, steps: Sequence[int]) -> list[TrialGroup]:
        """Returns up to `NUM_GROUPS` groups of the steps, in their order, without those whose data have changed."""
        found: list[TrialGroup] = []
        timeout_s = self._prepared.config.timeouts.object_s
        for step in steps:
            for recorded in self._log.read(step):
                if len(found) == NUM_GROUPS:
                    return found
                try:
                    scored = self._live.revive(recorded)
                except SkippedSample:
                    continue
                [group] = fetch([scored.group], timeout_s=timeout_s, what="a recorded group")
                found.append(TrialGroup(scored, group.prompt, group.trajectories))
        return found
