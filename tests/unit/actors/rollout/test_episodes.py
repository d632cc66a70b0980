"""Episodes, played and demonstrated."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from episode_data import Scripted, engine_settings, episode_config
from fakes import make_prompt
from scored_rows import chat_of

from mobula.actors.environments.bridge import TurnBridge
from mobula.actors.environments.rows import environment_split
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.actor import MediaBatcher
from mobula.actors.rollout.controls import controlled
from mobula.actors.rollout.episodes import Demonstration, Demonstrations, EpisodeRunner
from mobula.actors.samplers.huggingface import HuggingFaceSampler
from mobula.cluster.errors import DatasetError, EnvironmentFailedError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.arrow import from_batch, to_batch
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.partial_response import Attempt, TokenChunk
from mobula.cluster.records.trajectory import FinishReason, Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.configs.schema.run import Control
from mobula.learner.batch import fetch_items
from mobula.learner.policies.batch import collate
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import TINY
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.policies.trained import row_of

TEMPERATURE = 0.8
FIRST = Attempt("r")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY["qwen2.5-vl"](tmp_path_factory.mktemp("episodes") / "model")


class Bench:
    """A sampler that is loaded, and the episodes that it is asked for."""

    def __init__(self, model: Path) -> None:
        config = episode_config(model)
        self.model = model
        self.chat = chat_of(config)
        self.sampler = HuggingFaceSampler(engine_settings(model, self.chat))
        self._loop = asyncio.Runner()  # what the sampler waits with belongs to one loop
        self._loop.run(self.sampler.start())

    def prompt(self, *overrides: str, control: Control | None = None) -> tuple[EpisodeRunner, Prompt]:
        words = ("environment.num_train=2", "environment.host=inline")
        config = episode_config(self.model, *words, *overrides)
        chat = chat_of(config)
        media = MediaBatcher(MediaReader(timeout_s=5, max_items=64))
        runner = EpisodeRunner(config.environment, chat, self.sampler, media, model=str(self.model), max_images=8)
        options = {key: value for key, value in config.environment.options.items() if key != "fault"}
        honest = config.environment.model_copy(update={"options": options})
        rows = environment_split(honest, "train", takes_images=True).rows
        shown = rows if control is None else controlled(control, rows, chat, seed=0)
        return runner, chat.prepare(shown[0], "0/0/x")

    def run(
        self,
        *overrides: str,
        num_samples: int = 2,
        max_tokens: int = 5,
        attempt: Attempt = FIRST,
        report: Callable[[Sequence[TokenChunk]], None] = lambda chunks: None,
        note_failure: Callable[[str], None] = lambda kind: None,
        control: Control | None = None,
        **sampling: Any,
    ) -> TrajectoryGroup:
        async def run() -> TrajectoryGroup:
            runner, prompt = self.prompt(*overrides, control=control)
            settings = SamplingSettings(num_samples, TEMPERATURE, max_tokens, seed=7, **sampling)
            try:
                return await runner.generate(prompt, settings, attempt, report=report, note_failure=note_failure)
            finally:
                runner.close()

        return self._loop.run(run())


@pytest.fixture(scope="module")
def bench(model: Path) -> Bench:
    return Bench(model)


@pytest.fixture(scope="module")
def group(bench: Bench) -> TrajectoryGroup:
    return bench.run()


def test_episodes_have_turns_masks_images_and_rewards(group: TrajectoryGroup) -> None:
    for trajectory in group.trajectories:
        actions, turns = trajectory.actions, trajectory.response.turns
        assert isinstance(actions, TokenActions)
        assert trajectory.finish_reason is FinishReason.TERMINATED
        assert [turn.rewards for turn in turns] == [{"reward": 1.0}, {"reward": 2.0}, {"reward": 3.0}]
        sampled = np.zeros(trajectory.num_steps, dtype=bool)
        for turn in turns:
            sampled[turn.start : turn.end] = True
        assert np.array_equal(trajectory.action_mask, sampled)
        assert (trajectory.behavior_logprobs[~sampled] == 0).all()
        assert (trajectory.behavior_logprobs[sampled] < 0).all()
        assert len(actions.media) == 2, "behind the first and the second turn"
        assert not any(trajectory.action_mask[span.start : span.end].any() for span in actions.media_spans)
        assert trajectory.response.num_tokens == sampled.sum()
    assert group.summary().num_tokens == sum(int(t.action_mask.sum()) for t in group.trajectories)


def test_siblings_share_the_images_of_later_turns_also_when_they_travel(group: TrajectoryGroup) -> None:
    travelled = pickle.loads(pickle.dumps(group))
    for found in (group, travelled):
        first, second = (t.actions.media for t in found.trajectories)
        assert [m.key for m in first] == [m.key for m in second]
        assert all(a.reference is b.reference for a, b in zip(first, second, strict=True)), "stored once"
    assert travelled.trajectories[0].response == group.trajectories[0].response
    assert group.summary().num_bytes > sum(h.num_bytes for h in group.trajectories[0].actions.media)


def test_tokens_are_those_of_the_template_over_all_turns(bench: Bench, group: TrajectoryGroup) -> None:
    """What is put between turns is what the template writes, and what was sampled is kept to the id."""
    bridge = TurnBridge(bench.chat, str(bench.model))
    for trajectory in group.trajectories:
        first, second = trajectory.response.turns[:2]
        between = trajectory.actions.token_ids[first.end : second.start]
        is_cut = trajectory.actions.token_ids[first.end - 1] not in bench.chat.eos_token_ids
        text = bench.chat.tokenizer.decode(between)
        expected = "\n<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|> digit 1"
        expected += "<|im_end|>\n<|im_start|>assistant\n"
        assert text == ("<|im_end|>" if is_cut else "") + expected
        assert not is_cut or between[0] == bridge.end_id


@pytest.mark.parametrize("control", list(Control))
def test_controls_change_the_images_of_every_turn_and_nothing_else(
    control: Control, bench: Bench, group: TrajectoryGroup
) -> None:
    found = bench.run("environment.max_concurrent=1", control=control, num_samples=1)
    own, other = group.trajectories[0], found.trajectories[0]
    assert other.finish_reason is FinishReason.TERMINATED and other.response.failure == ""
    assert [turn.rewards for turn in other.response.turns] == [turn.rewards for turn in own.response.turns]
    media = [[m.key for m in (*of.prompt.media, *t.actions.media)] for of, t in ((group, own), (found, other))]
    if control is Control.DIRECT_PROMPT:
        assert media[0] == media[1]
    elif control is Control.NO_IMAGE:
        assert media[1] == []
    else:
        assert len(media[1]) == len(media[0]) and not set(media[0]) & set(media[1])
        assert len(set(media[1])) == 1, "one blank image, or the first image of the other episode"


@torch.no_grad()
def gaps(bench: Bench, group: TrajectoryGroup) -> list[np.ndarray]:
    """|learner - behaviour| of each sampled token."""
    learner = episode_config(bench.model).learner
    policy = TokenPolicy(load_model(str(bench.model), torch.float32, "sdpa").eval(), learner)
    rows = [row_of(group.prompt, trajectory.actions) for trajectory in group.trajectories]
    batch = collate(rows, MediaReader(timeout_s=5, max_items=64), torch.device("cpu"))
    logprobs = policy(batch, Distribution(TEMPERATURE, bench.chat.media_token_ids)).logprobs.numpy()
    return [
        np.abs(row[: t.num_steps] - t.behavior_logprobs)[t.action_mask]
        for row, t in zip(logprobs, group.trajectories, strict=True)
    ]


def test_the_learner_scores_every_turn_as_it_was_sampled(bench: Bench, group: TrajectoryGroup) -> None:
    for gap in gaps(bench, group):
        assert gap.mean() <= 1e-5 and gap.max() <= 1e-4


def test_turns_that_were_sampled_among_a_few_tokens_are_scored_among_the_same(bench: Bench) -> None:
    cut = bench.run(top_p=0.6, top_k=5, keeps_sets=True)
    travelled = pickle.loads(pickle.dumps(cut))
    recorded = from_batch(to_batch(cut, [Reward(1.0), None])).group
    expected = np.concatenate(gaps(bench, cut))
    assert expected.max() <= 1e-4
    for found in (cut, travelled, replace(recorded, prompt=cut.prompt)):
        assert np.array_equal(np.concatenate(gaps(bench, found)), expected)
        for trajectory in found.trajectories:
            assert isinstance(trajectory.actions, TokenActions) and trajectory.actions.kept is not None
            counts = trajectory.actions.kept.counts
            assert (counts[trajectory.action_mask] >= 1).all() and counts[trajectory.action_mask].max() <= 5
            assert (counts[~trajectory.action_mask] == 0).all(), "what the environment wrote is cut by nothing"


def test_later_turns_go_before_new_prompts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plain = [], bench.sampler.sample

    async def noted(prompt: Prompt, media: Any, settings: SamplingSettings, attempt: Attempt, emit: Any) -> Any:
        asked.append((attempt.request_id.rpartition("/")[2], settings.priority))
        return await plain(prompt, media, settings, attempt, emit)

    monkeypatch.setattr(bench.sampler, "sample", noted)
    bench.run(num_samples=1)
    assert asked == [("0", 0), ("1", -1), ("2", -1)]


def test_the_learner_does_not_train_what_the_environment_wrote(group: TrajectoryGroup) -> None:
    [items] = fetch_items([ScoredGroup(group.summary(), group, (Reward(1.0), None))], 0, 5.0)
    assert np.array_equal(items[0].loss_mask, group.trajectories[0].action_mask)
    assert items[0].sequence.media[1:] == group.trajectories[0].actions.media
    assert not items[1].loss_mask.any()


def test_records_keep_turns_and_images_of_later_turns_once(group: TrajectoryGroup) -> None:
    recorded = from_batch(to_batch(group, [Reward(1.0), None]))
    for found, trajectory in zip(recorded.group.trajectories, group.trajectories, strict=True):
        assert found.response == trajectory.response
        assert found.actions.media == trajectory.actions.media
        assert found.actions.media_spans == trajectory.actions.media_spans
        assert found.finish_reason is trajectory.finish_reason
        for again, once in zip(found.actions.media, trajectory.actions.media, strict=True):
            for name, tensor in once.reference.inputs.items():
                np.testing.assert_array_equal(again.reference.inputs[name], tensor)
            assert again.reference.thumbnail == once.reference.thumbnail
    assert recorded.has_all_media
    first, second = (trajectory.actions.media for trajectory in recorded.group.trajectories)
    assert all(a.reference is b.reference for a, b in zip(first, second, strict=True)), "written once"


def test_an_observation_that_does_not_fit_leaves_no_token_and_no_image(bench: Bench) -> None:
    for trajectory in bench.run("environment.max_tokens=16").trajectories:
        assert trajectory.finish_reason is FinishReason.TRUNCATED
        assert trajectory.is_truncated
        assert trajectory.num_steps <= 16
        assert trajectory.action_mask.all()
        assert trajectory.actions.media == ()


def test_episodes_are_a_function_of_the_seed(bench: Bench, group: TrajectoryGroup) -> None:
    again = bench.run()
    assert [t.actions.token_ids.tolist() for t in again.trajectories] == [
        t.actions.token_ids.tolist() for t in group.trajectories
    ]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("raise", "raised"), ("nan", "reward_not_finite"), ("image", "bad_media"),
     ("seed", "seed_ignored"), ("reset", "raised")],
)  # fmt: skip
def test_a_failed_episode_has_no_reward_and_is_no_error_of_the_run(bench: Bench, fault: str, kind: str) -> None:
    found = bench.run(f"environment.options={{fault: '{fault}'}}", num_samples=1)
    [trajectory] = found.trajectories
    assert trajectory.response.failure.startswith(kind)
    assert trajectory.num_steps >= 1


def test_special_tokens_in_an_observation_are_text(bench: Bench) -> None:
    [trajectory] = bench.run("environment.options={fault: 'special'}", num_samples=1).trajectories
    assert trajectory.response.failure == ""
    observed = trajectory.actions.token_ids[~trajectory.action_mask]
    assert "<|im_end|>" in bench.chat.tokenizer.decode(observed, skip_special_tokens=True)


def test_an_environment_that_always_fails_ends_the_run(bench: Bench) -> None:
    with pytest.raises(EnvironmentFailedError, match="raised 2"):
        bench.run("environment.options={fault: raise}", "environment.max_failed_fraction=0.015", num_samples=2)


def test_a_template_that_drops_images_or_changes_with_the_turn_before_is_refused(bench: Bench) -> None:
    for change, message in (
        (lambda messages: [(role, text.replace("<image>", "")) for role, text in messages], "0 placeholders"),
        (lambda messages: [(role, text + messages[1][1]) for role, text in messages], "depends on the text"),
        (lambda messages: messages[:2], "drops the text"),
    ):
        chat = chat_of(episode_config(bench.model))
        plain = chat.render
        chat.render = lambda messages, change=change, plain=plain, **rest: plain(change(list(messages)), **rest)
        with pytest.raises(ValueError, match=message):
            TurnBridge(chat, str(bench.model))


def test_a_stretch_of_actions_keeps_whole_media(group: TrajectoryGroup) -> None:
    actions = group.trajectories[0].actions
    span = actions.media_spans[0]
    parts = actions.stretch(0, span.start).followed_by(actions.stretch(span.start, actions.num_steps))
    assert (parts.media, parts.media_spans) == (actions.media, actions.media_spans)
    with pytest.raises(ValueError, match="cut one of the media"):
        actions.stretch(0, span.start + 1)
    assert replace(actions, media=(), media_spans=()).stretch(0, 1).media == ()


def interrupted(bench: Bench, num_turns: int, *overrides: str) -> tuple[InFlightRequests, Attempt]:
    """What the driver knows when the actor is lost after it has reported `num_turns` turns of each sibling."""
    table = InFlightRequests(5)
    request = table.of(make_prompt("0/0/x"), SamplingSettings(2, TEMPERATURE, 5, seed=7))
    attempt, num = request.next_attempt(), Counter[int]()

    def take(chunks: Sequence[TokenChunk]) -> None:
        for chunk in chunks:
            num[chunk.sibling] += 1
            if num[chunk.sibling] <= num_turns:
                request.add(chunk)

    bench.run(*overrides, attempt=attempt, report=take)
    return table, request.next_attempt()


@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_an_episode_goes_on_elsewhere_from_the_turns_that_were_reported(
    bench: Bench, group: TrajectoryGroup, num_turns: int
) -> None:
    """The group is that of an actor that lived; turns that were known are played, not sampled."""
    table, attempt = interrupted(bench, num_turns)
    reported: list[TokenChunk] = []
    Scripted.played.clear()
    resumed = bench.run(attempt=attempt, report=reported.extend)
    for found, whole in zip(resumed.trajectories, group.trajectories, strict=True):
        assert found.actions.token_ids.tolist() == whole.actions.token_ids.tolist()
        assert found.behavior_logprobs.tolist() == whole.behavior_logprobs.tolist()
        assert (found.response, found.weight_spans) == (whole.response, whole.weight_spans)
        assert [m.key for m in found.actions.media] == [m.key for m in whole.actions.media]
        assert found.actions.media_spans == whole.actions.media_spans
    assert len(Scripted.played) == 2 * 3, "every turn is played, also the known ones"
    assert len(reported) == 2 * (3 - num_turns), "and only new ones are reported"
    kept = sum(turn.end - turn.start for t in group.trajectories for turn in t.response.turns[:num_turns])
    assert table.resumed["tokens_kept"] == kept


@pytest.mark.parametrize(
    ("options", "kinds"), [("deterministic: false", {}), ("fault: drift, turn: 1", {"replay_differs": 2})]
)
def test_an_episode_that_cannot_be_played_again_begins_again(bench: Bench, options: str, kinds: dict[str, int]) -> None:
    words = f"environment.options={{{options}}}"
    _, attempt = interrupted(bench, 2, words)
    reported: list[TokenChunk] = []
    failures: Counter[str] = Counter()
    found = bench.run(words, attempt=attempt, report=reported.extend, note_failure=lambda kind: failures.update([kind]))
    assert failures == kinds
    assert [t.response.failure for t in found.trajectories] == ["", ""]
    first = [next(chunk for chunk in reported if chunk.sibling == n) for n in range(2)]
    assert all(chunk.is_restart and chunk.start == 0 for chunk in first)
    assert sum(chunk.is_restart for chunk in reported) == 2


def test_a_failed_try_is_run_again_with_the_same_seed_and_what_it_reported_counts_no_longer(bench: Bench) -> None:
    """The driver takes the chunks of both tries; the failure is counted by its kind."""
    Scripted.broken.clear()
    table, failures = InFlightRequests(5), Counter[str]()
    request = table.of(make_prompt("0/0/x"), SamplingSettings(1, TEMPERATURE, 5, seed=7))
    [trajectory] = bench.run(
        "environment.options={fault: once, turn: 2}",
        num_samples=1,
        attempt=request.next_attempt(),
        report=lambda chunks: [request.add(chunk) for chunk in chunks],
        note_failure=lambda kind: failures.update([kind]),
    ).trajectories
    assert failures == {"raised": 1}
    assert trajectory.response.failure == ""
    [known] = request.siblings
    assert known.actions.token_ids.tolist() == trajectory.actions.token_ids[trajectory.action_mask].tolist()
    assert known.finish_reason is FinishReason.TERMINATED and len(known.turns) == 3


# Demonstrated episodes have the tokens, masks and images that sampled episodes have.


async def demonstrated(config: RunConfig, num: int = 1) -> tuple[ChatProcessor, list[Demonstration]]:
    chat = chat_of(config)
    found = Demonstrations(config.environment, config.sampler, chat, model=config.policy.model, read=lambda media: [])
    try:
        rows = environment_split(config.environment, "train", takes_images=True).rows[:num]
        return chat, [await found.of(chat.prepare(row, f"0/{n}/x")) for n, row in enumerate(rows)]
    finally:
        found.close()


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_demonstration_is_a_whole_episode_whose_turns_alone_are_trained(model: Path, host: str) -> None:
    words = (f"environment.host={host}", "environment.num_train=1")
    chat, [found] = await demonstrated(episode_config(model, *words))
    written = chat.tokenizer.decode(found.actions.token_ids[found.mask])
    assert written == "go 1<|im_end|>go 2<|im_end|>go 3<|im_end|>"
    assert found.mask[-1], "what follows the last turn is no part of it"
    assert len(found.actions.media) == 2
    pad = chat.images.placeholder_id
    assert all((found.actions.token_ids[s.start : s.end] == pad).all() for s in found.actions.media_spans)
    assert not any(found.mask[s.start : s.end].any() for s in found.actions.media_spans)


async def test_the_calculator_shows_a_call_and_its_result_and_the_maze_a_way(model: Path) -> None:
    few = ("environment.num_train=24", f"policy.model={model}")
    _, [shown, *_] = await demonstrated(load_config(["experiment=calculator", *few]))
    assert np.count_nonzero(np.diff(shown.mask.astype(int)) == 1) == 1, "two turns"
    _, walks = await demonstrated(load_config(["experiment=pixel_maze", *few]), num=24)
    num_turns = [1 + np.count_nonzero(np.diff(walk.mask.astype(int)) == 1) for walk in walks]
    assert [len(walk.actions.media) for walk in walks] == [num - 1 for num in num_turns]
    assert 1 < np.mean(num_turns) < 4 and max(num_turns) >= 3


async def test_a_demonstrated_turn_that_the_policy_could_not_write_is_refused(model: Path) -> None:
    words = ["experiment=calculator", f"policy.model={model}", "environment.num_train=1", "sampler.max_tokens=64"]
    with pytest.raises(DatasetError, match=r"has 8\d tokens .* set sampler.max_tokens=8\d or more"):
        await demonstrated(load_config(words))


async def test_an_environment_that_shows_nothing_is_refused(model: Path) -> None:
    words = ["data=environment", "environment=gymnasium", "environment.host=inline", "environment.num_train=1"]
    config = load_config([*words, "rewards=environment", f"policy.model={model}", "data.max_pixels=50176"])
    with pytest.raises(DatasetError, match="demonstrates nothing"):
        await demonstrated(config)
