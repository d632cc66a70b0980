"""The dispatcher: retries, rejections, seeds, and the fate of every prompt."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fakes import SETTINGS, FakePrompts, FakeRewards, FakeRollouts, make_group, make_prompt, make_scored, turns
from waiting import until

from mobula.cluster.errors import (
    DatasetError,
    DeadlineError,
    EngineDiedError,
    ExcludedPromptError,
    LostObjectError,
    RewardError,
    RolloutError,
    UnscoredGroupError,
    WorkerDiedError,
)
from mobula.cluster.failures import Failure
from mobula.cluster.records.trajectory import Answers, Generated, Prompt, Reward, ScoredGroup
from mobula.cluster.replay.buffer import ReplayBuffer
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import AdmissionFilter, RetryingRollouts, RolloutDispatcher
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.staleness import StalenessGate
from mobula.cluster.runtime.seeds import derived_seed

KEEP_ALL = AdmissionFilter(min_scored=2, drop_uniform=False, max_rejected_in_a_row=100)
DROP_UNIFORM = AdmissionFilter(min_scored=2, drop_uniform=True, max_rejected_in_a_row=100)


class Bench:
    """A dispatcher of two groups a step with everything around it faked but gate and buffer."""

    def __init__(
        self,
        rollouts: FakeRollouts,
        rewards: FakeRewards,
        *,
        max_retries: int = 0,
        admission_filter: AdmissionFilter = KEEP_ALL,
        prompts: FakePrompts | None = None,
        **gate: int,
    ) -> None:
        self.prompts = prompts or FakePrompts()
        self.replay = ReplayBuffer()
        self.rollouts = rollouts
        self.retries: list[str] = []
        least = {"prompts_per_step": 2, "max_staleness": 0, "max_concurrent": 2, "total_steps": 100}
        self.gate = StalenessGate(**{**least, **gate})
        self.dispatcher = RolloutDispatcher(
            prompts=self.prompts,
            gate=self.gate,
            rollouts=RetryingRollouts(
                rollouts, InFlightRequests(64), max_retries=max_retries, on_retry=self.retries.append
            ),
            rewards=rewards,
            replay=self.replay,
            settings=SETTINGS,
            admission_filter=admission_filter,
        )

    async def step(self) -> list[str]:
        async with self.dispatcher.streaming():
            return ids(await asyncio.wait_for(self.replay.take(2), 2))


def ids(groups: list[ScoredGroup]) -> list[str]:
    return [group.summary.group_id for group in groups]


def failing(prompt_id: str, error: Exception, num_times: float = math.inf) -> FakeRollouts:
    """Rollouts that fail this prompt."""
    return FakeRollouts(fault=lambda found, attempt: error if found == prompt_id and attempt < num_times else None)


async def test_each_prompt_becomes_one_scored_group() -> None:
    rewards = FakeRewards(lambda prompt_id: (0.25, None))
    bench = Bench(FakeRollouts(), rewards, admission_filter=AdmissionFilter(1, False, 9))
    async with bench.dispatcher.streaming():
        groups = await asyncio.wait_for(bench.replay.take(2), 2)
    assert ids(groups) == ["0/0/s0", "0/1/s1"]
    assert [reward.value for reward in groups[0].scored_rewards] == [0.25]
    assert groups[0].rewards[1] is None


@pytest.mark.parametrize(
    ("marks", "totals", "by_accuracy", "by_reward"),
    [
        ((0, 0, 0), (-0.5, -1.0, 0.0), "uniform", None),  # all wrong; a length penalty makes the rewards differ
        ((1, 1, 1), (1.0, 0.5, 1.0), "uniform", None),
        ((0, 1, 0), (0.0, 1.0, 0.0), None, None),
        ((0, 1, 0), (0.5, 0.5, 0.5), "uniform", "uniform"),  # no gradient
        ((0.2, 0.6, 0.6), (0.2, 0.6, 0.6), None, None),  # graded
        ((None, None, None), (0.0, 1.0, 0.0), None, None),  # a recipe without the component
        ((None, None, None), (1.0, 1.0, 1.0), "uniform", "uniform"),
    ],
)
def test_uniform_groups_are_those_of_equal_accuracy_or_of_equal_rewards(
    marks: Sequence[float | None], totals: Sequence[float], by_accuracy: str | None, by_reward: str | None
) -> None:
    components = [{} if mark is None else {"right": float(mark)} for mark in marks]
    rewards = [Reward(total, of_one) for total, of_one in zip(totals, components, strict=True)]
    assert AdmissionFilter(2, True, 9, "right").reason_to_reject(rewards) == by_accuracy
    assert AdmissionFilter(2, True, 9).reason_to_reject(rewards) == by_reward
    assert AdmissionFilter(2, False, 9, "right").reason_to_reject(rewards) is None
    assert AdmissionFilter(2, False, 9).reason_to_reject(rewards[:1]) == "too_few_scored"


@pytest.mark.parametrize("error", [RolloutError("engine"), WorkerDiedError("rollout/1"), DeadlineError("slow")])
async def test_a_failed_prompt_is_tried_again_in_its_slot(error: Exception) -> None:
    bench = Bench(failing("0/0/s0", error, 2), FakeRewards(), max_retries=2)
    assert await bench.step() == ["0/0/s0", "0/1/s1"]
    assert bench.retries == [type(error).__name__] * 2


@pytest.mark.parametrize(
    ("death", "max_retries"),
    [
        (WorkerDiedError("rollout/1 died: its node is gone"), 1),
        (EngineDiedError("the engine failed prompt 0/0/s0", Failure("RuntimeError: no offset")), 0),
    ],
)
async def test_actors_that_die_together_count_once_for_a_prompt_and_engines_not_at_all(
    death: Exception, max_retries: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(failing("0/0/s0", death, 8), FakeRewards(), max_retries=max_retries)
    assert await bench.step() == ["0/0/s0", "0/1/s1"]
    assert bench.retries == [type(death).__name__] * 8
    assert caplog.messages == [], "the pool logs the loss, once"


async def test_an_excluded_prompt_gives_its_slot_to_the_next_one_and_is_settled() -> None:
    bench = Bench(failing("0/1/s1", ExcludedPromptError("prompt 0/1/s1 is excluded")), FakeRewards())
    assert await bench.step() == ["0/0/s0", "0/2/s2"]
    assert "0/1/s1" not in bench.dispatcher.state()["pending"], "a checkpoint does not bring it back"
    assert (await bench.replay.stats()).num_rejected == {"killed_engines": 1}
    assert bench.retries == []


async def test_a_poison_prompt_stops_the_run_with_its_id_and_cause() -> None:
    poison = RolloutError("bad image")
    bench = Bench(failing("0/1/s1", poison), FakeRewards(), max_retries=3)
    message = r"prompt 0/1/s1 \(sample s1\) failed 4 times.*max_rollout_retries=3"
    with pytest.raises(RolloutError, match=message) as caught:
        await bench.step()
    assert caught.value.__cause__ is poison


async def test_other_errors_are_not_tried_again() -> None:
    bench = Bench(failing("0/0/s0", TypeError("a bug")), FakeRewards(), max_retries=3)
    with pytest.raises(TypeError, match="a bug"):
        await bench.step()
    assert bench.rollouts.attempts["0/0/s0"] == 1


async def test_a_dead_producer_cancels_a_take_that_would_wait_for_ever() -> None:
    class Empty(FakePrompts):
        def next(self) -> Prompt:
            raise DatasetError("nothing is usable")

    bench = Bench(FakeRollouts(), FakeRewards(), prompts=Empty())
    with pytest.raises(DatasetError, match="nothing is usable"):
        async with asyncio.timeout(2), bench.dispatcher.streaming():
            await bench.replay.take(2)


async def test_uniform_groups_free_their_slots_and_others_take_their_place() -> None:
    def values(prompt_id: str) -> tuple[float, float]:
        return (1.0, 1.0) if int(prompt_id.split("/")[1]) < 5 else (0.0, 1.0)

    bench = Bench(FakeRollouts(), FakeRewards(values), admission_filter=DROP_UNIFORM)
    assert await bench.step() == ["0/5/s5", "0/6/s6"]
    assert (await bench.replay.stats()).num_rejected == {"uniform": 5}
    assert bench.dispatcher.pending() == ("0/5/s5", "0/6/s6")


async def test_a_rejected_straggler_holds_no_step_up() -> None:
    held = {"0/0/s0": asyncio.Event(), "0/3/s3": asyncio.Event()}

    class Held(FakeRollouts):
        async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
            if prompt.prompt_id in held:
                await held[prompt.prompt_id].wait()
            return await super().generate(prompt, settings)

    rollouts = Held()
    rewards = FakeRewards(lambda prompt_id: (1.0, 1.0) if prompt_id == "0/0/s0" else (0.0, 1.0))
    bench = Bench(rollouts, rewards, admission_filter=DROP_UNIFORM, prompts_per_step=1, max_staleness=1)
    async with bench.dispatcher.streaming():
        assert ids(await asyncio.wait_for(bench.replay.take(1), 2)) == ["0/1/s1"]
        rollouts.version = 1
        bench.dispatcher.advance(1)
        await until(lambda: bench.gate.num_accepted >= 2)
        assert (await bench.replay.stats()).num_ready == 0, "step 1 is the last one for the straggler: it waits"
        held["0/0/s0"].set()
        assert ids(await asyncio.wait_for(bench.replay.take(1), 2)) == ["0/2/s2"]


async def test_a_run_that_rejects_everything_ends_with_the_next_action() -> None:
    uniform = FakeRewards(lambda prompt_id: (1.0, 1.0))
    bench = Bench(FakeRollouts(), uniform, admission_filter=AdmissionFilter(2, True, 20))
    with pytest.raises(RolloutError, match=r"20 groups in a row.*'uniform'.*algorithm.drop_uniform_groups=false"):
        await bench.step()


async def test_a_run_whose_engines_stay_behind_ends_with_an_error() -> None:
    class Heedless(FakeRollouts):
        """Its engines stay at version 0, whatever is asked."""

        async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
            return await super().generate(prompt, replace(settings, min_version=-1))

    bench = Bench(Heedless(), FakeRewards(), admission_filter=AdmissionFilter(2, False, 3))
    bench.dispatcher.restore(1, {"cursor": 0, "pending": []})
    with pytest.raises(RolloutError, match="'over_age'"):
        await bench.step()


async def test_groups_of_rolled_back_weights_are_rejected_in_flight_and_finished() -> None:
    class Held(FakeRollouts):
        """Samples prompt 3 after `released`."""

        released = asyncio.Event()

        async def _pause(self, prompt_id: str, versions: Sequence[int]) -> None:
            if prompt_id == "0/3/s3" and versions:
                await self.released.wait()
            await turns(1)

    rollouts = Held()
    bench = Bench(rollouts, FakeRewards(), max_staleness=1)
    async with bench.dispatcher.streaming():
        first = await asyncio.wait_for(bench.replay.take(2), 2)
        await until(lambda: rollouts.attempts["0/3/s3"] and rollouts.num_in_flight == 1)
        assert bench.dispatcher.pending() == ("0/0/s0", "0/1/s1", "0/2/s2", "0/3/s3")
        bench.dispatcher.reject_before(1)
        bench.dispatcher.advance(1)
        rollouts.version = 1
        rollouts.released.set()
        await bench.replay.release(first)
        second = await asyncio.wait_for(bench.replay.take(2), 2)
    assert ids(first) == ["0/0/s0", "0/1/s1"]
    assert [group.summary.oldest_version for group in second] == [1, 1]
    assert (await bench.replay.stats()).num_rejected == {"rolled_back": 2}


async def test_prompts_of_an_announced_push_go_out_while_it_is_under_way_and_wait_for_it() -> None:
    rollouts = FakeRollouts()
    bench = Bench(rollouts, FakeRewards())
    async with bench.dispatcher.streaming():
        await bench.replay.release(await asyncio.wait_for(bench.replay.take(2), 2))
        await asyncio.sleep(0.01)
        assert rollouts.num_in_flight == 0, "staleness 0: nothing starts beside the step"
        bench.dispatcher.advance(1)
        await asyncio.sleep(0.01)
        assert rollouts.num_in_flight == 2
        rollouts.version = 1
        assert bench.dispatcher.pending() == ("0/2/s2", "0/3/s3")
        groups = await asyncio.wait_for(bench.replay.take(2), 2)
    assert [set(group.summary.tokens_by_version) for group in groups] == [{1}, {1}]


async def test_a_pool_that_loses_a_reward_is_named() -> None:
    bench = Bench(FakeRollouts(), FakeRewards(lambda prompt_id: (1.0,)))
    with pytest.raises(RewardError, match="2 trajectories and got 1 rewards"):
        await bench.step()


async def test_every_prompt_has_a_seed_of_its_own_that_a_retry_keeps() -> None:
    rollouts = FakeRollouts(fault=lambda prompt_id, attempt: RolloutError("once") if attempt == 0 else None)
    await Bench(rollouts, FakeRewards(), max_retries=1).step()
    seeds = {prompt_id: settings.seed for prompt_id, settings in rollouts.settings.items()}
    assert seeds == {prompt_id: derived_seed(SETTINGS.seed, prompt_id) for prompt_id in seeds}
    assert len({derived_seed(run, f"0/{i}/s") for run in range(3) for i in range(100)}) == 300
    assert all(0 <= derived_seed(0, str(i)) < 2**31 for i in range(100))


async def test_pending_prompts_leave_when_trained_and_come_first_after_a_restore() -> None:
    bench = Bench(FakeRollouts(), FakeRewards())
    assert await bench.step() == ["0/0/s0", "0/1/s1"]
    assert bench.dispatcher.state() == {
        "cursor": 2, "pending": ["0/0/s0", "0/1/s1"], "shown": ["0/0/s0", "0/1/s1"], "rejected_in_a_row": 0,
    }  # fmt: skip

    other = Bench(FakeRollouts(), FakeRewards())
    other.dispatcher.restore(0, {"cursor": 7, "pending": ["0/3/s3", "0/1/s1", "0/5/s5"]})
    assert other.dispatcher.pending() == ("0/3/s3", "0/1/s1", "0/5/s5"), "also those not handed out again yet"
    assert await other.step() == ["0/3/s3", "0/1/s1"]
    other.dispatcher.advance(1)
    assert other.dispatcher.state()["pending"] == ["0/5/s5"]


async def test_after_a_kill_finished_groups_are_not_sampled_again_and_every_other_place_is_pending() -> None:
    bench = Bench(FakeRollouts(), FakeRewards())
    bench.dispatcher.restore(0, {"cursor": 3, "pending": ["0/1/s1", "0/2/s2"]})
    assert [bench.dispatcher.is_open(f"0/{n}/s{n}") for n in range(4)] == [False, True, True, True]
    bench.dispatcher.catch_up(0, ["0/1/s1", "0/5/s5"], [make_scored("0/3/s3")])
    state = bench.dispatcher.state()
    assert (state["cursor"], state["pending"]) == (6, ["0/2/s2", "0/3/s3", "0/4/s4"])
    assert await bench.step() == ["0/2/s2", "0/3/s3"], "in the order of the sequence"
    assert set(bench.rollouts.attempts) == {"0/2/s2"}
    assert bench.dispatcher.pending() == ("0/2/s2", "0/3/s3", "0/4/s4")


async def test_steps_that_were_complete_when_the_run_was_killed_are_put_at_once() -> None:
    bench = Bench(FakeRollouts(), FakeRewards())
    bench.dispatcher.restore(4, {"cursor": 8, "pending": ["0/6/s6", "0/7/s7"]})
    versions = (4,) * 3
    groups = [make_group(make_prompt(i), versions) for i in ("0/7/s7", "0/6/s6")]
    bench.dispatcher.catch_up(4, [], [ScoredGroup(g.summary(), g, (Reward(1.0),) * 2) for g in groups])
    assert await bench.step() == ["0/6/s6", "0/7/s7"]
    assert not bench.rollouts.attempts


async def test_a_row_that_became_unusable_is_not_pending_for_ever() -> None:
    class Skipping(FakePrompts):
        def next(self) -> Prompt:
            prompt = super().next()
            return super().next() if prompt.prompt_id == "0/0/s0" else prompt

    bench = Bench(FakeRollouts(), FakeRewards(), prompts=Skipping())
    bench.dispatcher.restore(0, {"cursor": 4, "pending": ["0/0/s0", "0/2/s2"]})
    assert await bench.step() == ["0/2/s2", "0/4/s4"]
    assert bench.dispatcher.pending() == ("0/2/s2", "0/4/s4")


async def test_a_group_that_waits_for_room_keeps_its_slot() -> None:
    bench = Bench(FakeRollouts(), FakeRewards(), prompts_per_step=1, max_staleness=3)
    bench.replay = bench.dispatcher.replay = ReplayBuffer(max_bytes=1, min_ready=1)
    async with bench.dispatcher.streaming():
        while (await bench.replay.stats()).num_waiting < 2:
            await asyncio.sleep(0.001)
        assert (bench.gate.num_accepted, len(bench.gate.running), len(bench.rollouts.attempts)) == (1, 2, 3)
        assert len(await asyncio.wait_for(bench.replay.take(1), 5)) == 1
        await until(lambda: bench.gate.num_accepted >= 2)


async def test_nothing_runs_on_after_the_stream_has_ended() -> None:
    rollouts = FakeRollouts(pauses=lambda prompt_id: 10_000)
    bench = Bench(rollouts, FakeRewards())
    before, error = asyncio.all_tasks(), KeyError("the learner failed")
    with pytest.raises(KeyError) as caught:
        async with bench.dispatcher.streaming():
            await until(lambda: rollouts.num_in_flight >= 2)
            raise error
    assert caught.value is error
    assert rollouts.num_in_flight == 0
    assert asyncio.all_tasks() == before


async def test_a_group_that_is_lost_with_its_node_before_it_is_scored_is_sampled_again() -> None:
    losses = [LostObjectError("groups to score cannot be had: the node that held it is gone")] * 2

    def values(prompt_id: str) -> tuple[float, float]:
        if prompt_id == "0/1/s1" and losses:
            raise losses.pop()
        return (0.0, 1.0)

    bench = Bench(FakeRollouts(), FakeRewards(values))
    assert await bench.step() == ["0/0/s0", "0/1/s1"]
    assert bench.rollouts.attempts["0/1/s1"] == 3 and bench.rollouts.attempts["0/0/s0"] == 1


async def test_a_pool_gets_responses_by_value_where_the_rollouts_tell_them() -> None:
    class TellingRollouts(FakeRollouts):
        async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
            group, summary, _ = await super().generate(prompt, settings)
            return Generated.of(prompt, group, (summary, group.small_responses()))

    class ReadingRewards(FakeRewards):
        read: dict[str, list[str]] = {}

        async def score(self, group: Answers, group_id: str) -> list[Reward | None]:
            self.read[group_id] = [response.text for response in group.responses]
            return [Reward(0.0), Reward(1.0)]

    bench = Bench(TellingRollouts(), ReadingRewards())
    taken = await bench.step()
    assert taken == ["0/0/s0", "0/1/s1"]
    assert ReadingRewards.read["0/1/s1"] == ["answer of 0/1/s1#0", "answer of 0/1/s1#1"]


async def test_a_group_that_cannot_be_scored_is_rejected_and_the_run_goes_on() -> None:
    def values(prompt_id: str) -> tuple[float, float]:
        if prompt_id == "0/1/s1":
            raise UnscoredGroupError("3 reward workers were lost over one group")
        return (0.0, 1.0)

    bench = Bench(FakeRollouts(), FakeRewards(values), admission_filter=AdmissionFilter(1, False, 9))
    assert await bench.step() == ["0/0/s0", "0/2/s2"]
    assert (await bench.replay.stats()).num_rejected == {"too_few_scored": 1}
