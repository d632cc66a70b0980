"""Each rank fetches what it trains; what the others have fetched reaches it as outlines that credit computes with."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from flow_run import latent_actions, latent_group, latent_prompt
from learner_data import group, image, prompt, random_groups, tiny_config
from ranks_in_threads import RanksInThreads, Store

from mobula.cluster.errors import WrongGroupError
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import FinishReason, MediaSpan, Reward, ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner import batch
from mobula.learner.batch import LearnerItem, collate_items, fetch_items
from mobula.learner.credit import Credit
from mobula.learner.policies.base import RowOutline
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.scoring_pass import with_scores
from mobula.learner.shares import Exchange, Portion, ShareFetcher, StepGroups, in_portions, planner_of, wanted_by_rank

Steps = list[list[LearnerItem]]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(batch, "fetch_or_miss", store.fetch)
    return store


class Ranks(RanksInThreads):
    """Ranks that fetch a step."""

    def __init__(self, config: RunConfig, num: int, store: Store) -> None:
        super().__init__(num, store)
        self._config = config

    def fetch(self, groups: Sequence[ScoredGroup], version: int, unlucky: int | None = None) -> list[Steps | Exception]:
        """What each rank gets; for `unlucky` every fetch fails."""
        return self.fetch_portions(groups, version, [None] * self.num, unlucky)

    def fetch_portions(
        self,
        groups: Sequence[ScoredGroup],
        version: int,
        portions: Sequence[Portion | None],
        unlucky: int | None = None,
    ) -> list[Steps | Exception]:
        def fetched(rank: int, exchange: Exchange) -> Steps:
            entries = StepGroups(groups, version, self._config, portion=portions[rank])
            return ShareFetcher(rank, self.num, exchange).fetch(entries)

        return self.each(fetched, unlucky)

    async def called(self, groups: Sequence[ScoredGroup], version: int) -> tuple[list[Steps], list[Sequence[Portion]]]:
        """What each rank gets from its references, and the portions of each call."""
        calls: list[Sequence[Portion]] = []

        async def call(outlines: Sequence[ScoredGroup], portions: Sequence[Portion]) -> list[Steps]:
            calls.append(portions)
            found = self.fetch_portions(outlines, version, portions)
            for error in found:
                if isinstance(error, Exception):
                    raise error
            return found

        planned = planner_of(self._config)
        found = await in_portions(
            call,
            groups,
            version,
            num_ranks=self.num,
            planned=planned,
            put=lambda value: pickle.loads(pickle.dumps(value)),
        )
        return found, calls


def with_reference(groups: Sequence[ScoredGroup], seed: int = 0) -> list[ScoredGroup]:
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(
            scored,
            reference_logprobs=[
                rng.normal(-5.0, 0.2, size=t.num_steps).astype(np.float32) for t in scored.group.trajectories
            ],
        )
        for scored in groups
    ]


def cut_off(scored: ScoredGroup) -> ScoredGroup:
    """The same group, whose first response hit the length limit."""
    first, *others = scored.group.trajectories
    rows = (dataclasses.replace(first, finish_reason=FinishReason.LENGTH), *others)
    return dataclasses.replace(scored, group=dataclasses.replace(scored.group, trajectories=rows))


def is_whole(item: LearnerItem) -> bool:
    return not isinstance(item.sequence, RowOutline)


def large_groups(tokenizer, num_groups: int, num_siblings: int = 4, longest: int = 300) -> list[ScoredGroup]:
    """Groups with other lengths each, no images."""
    rng = np.random.default_rng(3)
    return [
        group(
            prompt(tokenizer, f"0/{n}/row-{n}"),
            [rng.integers(0, 250, size=rng.integers(longest // 2, longest)).tolist() for _ in range(num_siblings)],
            rng.integers(0, 2, size=num_siblings).astype(float).tolist(),
            n,
        )
        for n in range(num_groups)
    ]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_fetches_its_share_of_the_bytes(folder, tokenizer, store, num_ranks: int) -> None:
    groups = with_reference(large_groups(tokenizer, 24))
    stored = store.put(groups)
    total = sum(len(g.group.content) + len(g.reference_logprobs.content) for g in stored)
    ranks = Ranks(tiny_config(folder, "algorithm.kl.coef=0.01"), num_ranks, store)
    ranks.fetch(stored, 1)
    largest_group = max(len(g.group.content) + len(g.reference_logprobs.content) for g in stored)
    assert len(store.num_bytes) == num_ranks
    assert max(store.num_bytes.values()) <= total / num_ranks + 2 * largest_group  # a group is fetched whole
    assert min(store.num_bytes.values()) >= total / num_ranks - 2 * largest_group
    assert sum(store.num_bytes.values()) <= total + (num_ranks - 1) * largest_group
    assert ranks.num_exchanged < 0.25 * total  # outlines of everything: rewards, sizes and masks


WORDS = {
    "grpo": (),
    "epochs": ("algorithm.num_epochs=2", "algorithm.num_minibatches=3"),
    "whole-step statistics": ("algorithm=reinforce_pp", "algorithm.kl.coef=0.1", "algorithm.shaping.whiten=true"),
    "scored before": ("algorithm.old_logprobs=recomputed", "algorithm.entropy.top_share=0.2"),
    "penalties": (
        "algorithm.shaping.repetition_penalty=0.5",
        "algorithm.shaping.length_penalty=0.2",
        "algorithm.shaping.running_moments=standardise",
        "algorithm.overlong_filter=true",
    ),
    "critic": ("algorithm=ppo_gae", "algorithm.kl.coef=0", "algorithm.num_minibatches=2"),
    "components": ("algorithm=gdpo", "algorithm.kl.coef=0"),
    "prompts of both steps": ("algorithm.advantage=prompt_stats", "algorithm.prompt_history_steps=1"),
    "padded": ("learner.packing=false", "algorithm.num_minibatches=2"),
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_every_rank_computes_what_it_would_with_all_groups(folder, tokenizer, store, words: tuple[str, ...]) -> None:
    config = tiny_config(folder, "learner.tokens_per_microbatch=60", *words)
    groups = with_reference([cut_off(g) for g in random_groups(tokenizer, 7, 3, seed=11)])
    groups = [
        dataclasses.replace(
            g, rewards=tuple(Reward(r.value, {"accuracy": r.value, "format": n / 3}) for n, r in enumerate(g.rewards))
        )
        for g in groups
    ]
    groups[3] = dataclasses.replace(groups[3], rewards=(None, None, None))
    expected = fetch_items(groups, 0, 1.0)
    wanted = wanted_by_rank(expected, config, 1, 3)
    for rank, found in enumerate(Ranks(config, 3, store).fetch(store.put(groups), 1)):
        assert wanted_by_rank(found, config, 1, 3) == wanted, "rows are shared out as before"
        items = [item for row in found for item in row]
        assert {item.index for item in items if is_whole(item)} >= wanted[rank]
        assert not all(is_whole(item) for item in items) or len(wanted[rank]) > len(items) / 2
        assert_equal_credit(config, found, expected)


def assert_equal_credit(config: RunConfig, found: Steps, expected: Steps) -> None:
    """Advantages, masks and metrics, bit for bit."""
    if config.algorithm.critic.is_on:
        found, expected = (with_values(groups) for groups in (found, expected))
    ours, theirs = (Credit(config).assign(groups) for groups in (found, expected))
    assert ours.metrics == theirs.metrics
    for one, other in zip(
        (i for row in ours.groups for i in row), (i for row in theirs.groups for i in row), strict=True
    ):
        assert (one.index, one.group, one.is_truncated, one.reward) == (
            other.index,
            other.group,
            other.is_truncated,
            other.reward,
        )
        for name in ("loss_mask", "kept_mask", "policy_mask", "ages", "advantages", "returns"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)


def with_values(groups: Steps) -> Steps:
    rng = np.random.default_rng(0)
    return [
        [dataclasses.replace(i, values=rng.normal(size=i.sequence.num_targets + 1).astype(np.float32)) for i in row]
        for row in groups
    ]


def test_distillation_has_the_log_probs_of_all_rows(folder, tokenizer, store, tmp_path: Path) -> None:
    teacher = write_tiny_qwen2_5_vl(tmp_path / "teacher", seed=1)
    config = tiny_config(folder, "algorithm=distill", f"algorithm.distillation.teacher={teacher}")
    groups = with_reference(random_groups(tokenizer, 6, 2))
    for found in Ranks(config, 2, store).fetch(store.put(groups), 1):
        assert_equal_credit(config, found, fetch_items(groups, 0, 1.0))


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
async def test_a_rank_with_the_references_of_its_share_alone_fetches_the_same(
    folder, tokenizer, store, words: tuple[str, ...]
) -> None:
    config = tiny_config(folder, "learner.tokens_per_microbatch=60", *words)
    groups = with_reference(random_groups(tokenizer, 7, 3, seed=11))
    stored, ranks = store.put(groups), Ranks(config, 3, store)
    found, calls = await ranks.called(stored, 1)
    for one, other in zip(found, ranks.fetch(stored, 1), strict=True):
        assert [is_whole(i) for row in one for i in row] == [is_whole(i) for row in other for i in row]
        assert_equal_credit(config, one, other)
    [portions] = calls
    assert all(len(portion.references) < len(groups) for portion in portions)
    assert set().union(*(portion.references for portion in portions)) == set(range(len(groups)))


@pytest.mark.parametrize("num_ranks", [4, 16, 64])
def test_the_references_of_all_ranks_grow_with_the_groups_alone(folder, tokenizer, num_ranks: int) -> None:
    groups = large_groups(tokenizer, 2 * num_ranks, num_siblings=2, longest=12)
    held = planner_of(tiny_config(folder))(groups, 1, num_ranks)
    assert sum(map(len, held)) <= 2 * len(groups), "a group has two siblings, each of which one rank trains"


async def test_ranks_get_more_references_where_exact_sizes_assign_other_groups_to_them(
    folder, tokenizer, store
) -> None:
    config, groups, later = misleading(folder, tokenizer)
    ranks = Ranks(config, 2, store)
    found, calls = await ranks.called(store.put(later), 1)
    wanted = wanted_by_rank(fetch_items(later, 0, 1.0), config, 1, 2)
    for rank, items in enumerate(found):
        assert {i.index for row in items for i in row if is_whole(i)} >= wanted[rank]
    assert [portion.is_final for portions in calls for portion in portions] == [False, False, True, True]
    assert all(len(more.references) >= len(first.references) for first, more in zip(*calls, strict=True))


def misleading(folder, tokenizer) -> tuple[RunConfig, list[ScoredGroup], list[ScoredGroup]]:
    """A configuration and groups; the same with media of later turns, which summaries do not have."""
    config = tiny_config(folder, "learner.image_token_cost=5", "learner.tokens_per_microbatch=60")
    groups = random_groups(tokenizer, 6, 2, seed=2, longest=4)
    later = []
    for n, scored in enumerate(groups):
        siblings = tuple(
            dataclasses.replace(
                t,
                actions=dataclasses.replace(
                    t.actions, media=(image(50 + n, 6, 4),), media_spans=(MediaSpan(0, 1 + 200 * (n % 2)),)
                ),
            )
            for t in scored.group.trajectories
        )
        later.append(dataclasses.replace(scored, group=dataclasses.replace(scored.group, trajectories=siblings)))
    return config, groups, later


def test_media_of_later_turns_are_fetched_although_no_summary_has_them(folder, tokenizer, store) -> None:
    """A rank first fetches other groups than it trains."""
    config, groups, later = misleading(folder, tokenizer)
    wanted = wanted_by_rank(fetch_items(later, 0, 1.0), config, 1, 2)
    planned = wanted_by_rank(fetch_items(groups, 0, 1.0), config, 1, 2)
    assert wanted != planned, "the summaries mislead here"
    for rank, found in enumerate(Ranks(config, 2, store).fetch(store.put(later), 1)):
        assert {i.index for row in found for i in row if is_whole(i)} >= wanted[rank]


def test_a_group_that_one_rank_cannot_fetch_is_missed_by_all_of_them(folder, tokenizer, store) -> None:
    groups = store.put(random_groups(tokenizer, 4, 2))
    found = Ranks(tiny_config(folder), 2, store).fetch(groups, 1, unlucky=1)
    assert [str(error) for error in found] == ["learner/1: groups cannot be had"] * 2


def test_a_group_with_another_content_than_reported_is_refused_by_all_ranks_at_once(folder, tokenizer, store) -> None:
    """Two ranks fetch each group once: one rank alone reads the altered one."""
    groups = [dataclasses.replace(scored, summary=scored.group.summary()) for scored in random_groups(tokenizer, 4, 2)]
    stored = store.put(groups)
    altered = [*stored[:1], dataclasses.replace(stored[1], group=stored[2].group), *stored[2:]]
    found = Ranks(tiny_config(folder), 2, store).fetch(altered, 1)
    assert [type(error) for error in found] == [WrongGroupError] * 2
    assert str(found[0]) == str(found[1])
    assert f"group {groups[1].summary.group_id} has sha256" in str(found[0])


def test_a_step_without_any_reward_is_known_to_all(folder, tokenizer, store) -> None:
    groups = [group(prompt(tokenizer, f"g{n}"), [[1, 2], [3]], [None, None], n) for n in range(3)]
    for found in Ranks(tiny_config(folder), 2, store).fetch(store.put(groups), 1):
        assert [i.sequence.num_targets for row in found for i in row] == [2, 1] * 3
        assert not any(i.loss_mask.any() for row in found for i in row)


def test_latents_stay_with_the_rank_that_trains_them(folder, store) -> None:
    siblings = [
        latent_group(latent_prompt(f"a cat {n}"), [latent_actions(2 * n), latent_actions(2 * n + 1)]) for n in range(4)
    ]
    groups = [ScoredGroup(g.summary(), g, (Reward(1.0), Reward(0.0))) for g in siblings]
    for found in Ranks(tiny_config(folder), 2, store).fetch(store.put(groups), 3):
        own = [is_whole(i) for row in found for i in row]
        assert sum(own) == 4, "half of them"
        expected = [i for row in fetch_items(groups, 2, 1.0) for i in row]
        for item, other in zip((i for row in found for i in row), expected, strict=True):
            assert item.sequence.num_tokens == other.sequence.num_tokens == 3 * 4
            np.testing.assert_array_equal(item.ages, other.ages, strict=True)


def test_what_a_flow_model_predicted_is_kept_by_the_rank_that_trains_the_row(folder, store) -> None:
    """DiffusionNFT's scoring pass hands every rank the predictions of all rows."""
    siblings = [latent_group(latent_prompt(f"a cat {n}"), [latent_actions(n)] * 2) for n in range(4)]
    groups = [ScoredGroup(g.summary(), g, (Reward(1.0), Reward(0.0))) for g in siblings]
    predicted = np.ones((3, 1, 2, 2), np.float32)
    for found in Ranks(tiny_config(folder), 2, store).fetch(store.put(groups), 3):
        nothing = np.empty(0, np.float32)
        rows = [with_scores(i, {i.index: (nothing, nothing, predicted)}).sequence for row in found for i in row]
        whole = [row for row in rows if not isinstance(row, RowOutline)]
        assert len(rows) == 8 and len(whole) == 4
        assert all(row.old is predicted for row in whole)


def test_a_row_of_another_rank_cannot_be_put_into_a_batch(folder, tokenizer, store) -> None:
    groups = store.put(random_groups(tokenizer, 4, 2))
    found, _ = Ranks(tiny_config(folder), 2, store).fetch(groups, 1)
    outlined = [i for row in found for i in row if not is_whole(i)]
    with pytest.raises(AssertionError, match="a row of another rank"):
        collate_items(outlined[:1], MediaReader(timeout_s=1, max_items=1), torch.device("cpu"))


def test_one_rank_fetches_everything(folder, tokenizer, store) -> None:
    [found] = Ranks(tiny_config(folder), 1, store).fetch(store.put(random_groups(tokenizer, 3, 2)), 1)
    assert all(is_whole(i) for row in found for i in row)
