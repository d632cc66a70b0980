"""Each rank fetches what it trains; what the others have fetched reaches it as outlines that credit computes with."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flow_run import latent_actions, latent_group, latent_prompt
from learner_data import group, image, prompt, random_groups, tiny_config
from offline_rows import config_of, rows
from ranks_in_threads import RanksInThreads, Store, Stored
from transformers import AutoTokenizer

from mobula.cluster.errors import WrongGroupError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import FinishReason, MediaSpan, Prompt, Reward, ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner import batch, examples
from mobula.learner.batch import LearnerItem, collate_items, fetch_items
from mobula.learner.credit import Credit
from mobula.learner.examples import (
    DataRows,
    Example,
    ExampleOutline,
    SharedExample,
    StoredExample,
    TaughtExamples,
    collate_examples,
    fetch_examples,
    planners_of,
    portions_of_examples,
    stored_examples,
    totals_of,
)
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.offline import build_objective
from mobula.learner.policies.base import RowOutline
from mobula.learner.policies.flow.policy import CleanSequence, Noising
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.scoring_pass import with_scores
from mobula.learner.shares import (
    ELSEWHERE,
    Exchange,
    Portion,
    ShareFetcher,
    StepGroups,
    in_portions,
    planner_of,
    wanted_by_rank,
)

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


Parts = list[list[SharedExample]]


@pytest.fixture
def example_store(monkeypatch: pytest.MonkeyPatch) -> Store:
    example_store = Store()
    monkeypatch.setattr(examples, "fetch_or_miss", example_store.fetch)
    return example_store


def fetched(
    config: RunConfig,
    num_ranks: int,
    example_store: Store,
    parts: list[list[ScoredGroup]],
    unlucky: int | None = None,
) -> list[Parts]:
    """What each rank gets."""
    row = build_objective(config, PLAIN).row
    ranks = RanksInThreads(num_ranks, example_store)

    def fetch(rank: int, exchange: Exchange) -> Parts:
        entries = DataRows(parts, config, row)
        return entries.in_parts(ShareFetcher(rank, num_ranks, exchange).fetch(entries))

    return ranks.each(fetch, unlucky)


def own_rows(part: list[SharedExample], config: RunConfig, rank: int, num_ranks: int) -> list[list[int]]:
    """The places in a part of the rows of each of its micro-batches."""
    shares = shares_of_ranks(part, config.learner, num_ranks)[rank]
    places = {id(example): n for n, example in enumerate(part)}
    return [[places[id(example)] for example in share if id(example) in places] for share in shares]


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model", "regression"])
def test_each_rank_has_its_share_whole_and_the_totals_of_all(
    folder: Path, tokenizer, example_store: Store, job: str
) -> None:
    config = config_of(folder, job, "learner.tokens_per_microbatch=120")
    parts = [rows(tokenizer, job, num=7, seed=1), rows(tokenizer, job, num=4, seed=2)]
    row = build_objective(config, PLAIN).row
    expected = [fetch_examples(part, row, 1.0) for part in parts]
    found = fetched(config, 3, example_store, [example_store.put(part) for part in parts])
    for rank, theirs in enumerate(found):
        for part, whole in zip(theirs, expected, strict=True):
            assert totals_of(part) == totals_of(whole)
            shares = own_rows(part, config, rank, 3)
            assert shares == own_rows(whole, config, rank, 3), "rows are shared out as with all of them at hand"
            for n in (n for share in shares for n in share):
                mine = part[n]
                assert isinstance(mine, Example)
                for one, other in zip(mine.candidates, whole[n].candidates, strict=True):
                    np.testing.assert_array_equal(one.sequence.token_ids, other.sequence.token_ids, strict=True)
                    np.testing.assert_array_equal(one.mask, other.mask, strict=True)
                    assert one.label == other.label
    assert not all(isinstance(example, Example) for part in found[0] for example in part)


def test_two_ranks_fetch_each_row_once(folder: Path, tokenizer, example_store: Store) -> None:
    """Prompts are not shared here: that two rows have the same one is known once they are fetched."""
    stored = example_store.put(rows(tokenizer, "dpo", num=40))
    total = sum(len(g.group.content) + len(g.reference_logprobs.content) for g in stored)
    fetched(config_of(folder, "dpo", "learner.share_prompts=false"), 2, example_store, [stored])
    assert len(example_store.num_bytes) == 2 and sum(example_store.num_bytes.values()) == total
    assert max(example_store.num_bytes.values()) < 0.7 * total


def fetched_in_portions(
    config: RunConfig, job: str, num_ranks: int, example_store: Store, rows: list[ScoredGroup]
) -> tuple[list[Parts], list[Sequence[Portion]]]:
    """What each rank gets from its references, and the portions of each call."""
    row, calls = build_objective(config, PLAIN).row, []

    async def call(outlines: Sequence[ScoredGroup], portions: Sequence[Portion]) -> list[Parts]:
        calls.append(portions)

        def fetch(rank: int, exchange: Exchange) -> Parts:
            entries = DataRows([outlines], config, row, portions[rank])
            return entries.in_parts(ShareFetcher(rank, num_ranks, exchange).fetch(entries))

        found = RanksInThreads(num_ranks, example_store).each(fetch)
        if isinstance(found[0], Exception):
            raise found[0]
        return found

    planned = planners_of(config).groups
    found = asyncio.run(in_portions(call, rows, 1, num_ranks=num_ranks, planned=planned, put=lambda value: value))
    return found, calls


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model", "regression"])
def test_a_rank_receives_the_references_of_its_rows_alone(
    folder: Path, tokenizer, example_store: Store, job: str
) -> None:
    """The sizes that summaries predict are exact: one call."""
    config = config_of(folder, job, "learner.tokens_per_microbatch=120", "learner.share_prompts=false")
    stored = example_store.put(rows(tokenizer, job, num=12, seed=1))
    found, [portions] = fetched_in_portions(config, job, 3, example_store, stored)
    assert sum(len(portion.references) for portion in portions) < 1.5 * len(stored)
    assert set().union(*(portion.references for portion in portions)) == set(range(len(stored)))
    [everything] = fetched(config, 1, example_store, [stored])
    for rank, [mine] in enumerate(found):
        assert totals_of(mine) == totals_of(everything[0])
        assert own_rows(mine, config, rank, 3) == own_rows(everything[0], config, rank, 3)
        whole = {n for n, example in enumerate(mine) if isinstance(example, Example)}
        assert whole == set(portions[rank].references)


def test_rows_with_one_prompt_are_assigned_again_once_that_is_known(
    folder: Path, tokenizer, example_store: Store
) -> None:
    config = config_of(folder, "sft", "learner.packing=true", "learner.share_prompts=true")
    groups = rows(tokenizer, "sft", num=12, seed=1)
    repeated = [with_prompt(scored, groups[n % 3].group.prompt) for n, scored in enumerate(groups)]
    found, calls = fetched_in_portions(config, "sft", 2, example_store, example_store.put(repeated))
    assert [all(portion.is_final for portion in portions) for portions in calls] == [False, True]
    [everything] = fetched(config, 1, example_store, [example_store.put(repeated)])
    for rank, [mine] in enumerate(found):
        assert own_rows(mine, config, rank, 2) == own_rows(everything[0], config, rank, 2)


def test_a_row_that_one_rank_cannot_fetch_is_missed_by_all_of_them(
    folder: Path, tokenizer, example_store: Store
) -> None:
    found = fetched(
        config_of(folder, "sft"),
        2,
        example_store,
        [example_store.put(rows(tokenizer, "sft"))],
        unlucky=1,
    )
    assert [str(error) for error in found] == ["learner/1: rows cannot be had"] * 2


def test_an_example_of_another_rank_cannot_be_put_into_a_batch(folder: Path, tokenizer, example_store: Store) -> None:
    [part], _ = fetched(config_of(folder, "sft"), 2, example_store, [example_store.put(rows(tokenizer, "sft"))])
    outlined = [example for example in part if not isinstance(example, Example)]
    with pytest.raises(AssertionError, match="an example of another rank"):
        collate_examples(outlined[:1], MediaReader(timeout_s=1, max_items=1), torch.device("cpu"))


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model"])
def test_examples_of_one_prompt_compute_it_once(folder: Path, tokenizer, example_store: Store, job: str) -> None:
    """Eight rows with four prompts, two of which are equal; a pair has its prompt once."""
    config = config_of(folder, job, "learner.packing=true", "learner.share_prompts=true")
    groups = rows(tokenizer, job, num=8, seed=1)
    repeated = [with_prompt(scored, groups[n // 2].group.prompt) for n, scored in enumerate(groups)]
    row = build_objective(config, PLAIN).row
    whole = fetch_examples(repeated, row, 1.0)
    assert [len({example.group for example in whole[n : n + 2]}) for n in range(0, 8, 2)] == [1] * 4
    assert len({example.group for example in whole}) == 3
    for example, scored in zip(whole, repeated, strict=True):
        size, prompt = example.sequence, scored.group.prompt.num_tokens
        lengths = [candidate.sequence.num_tokens for candidate in example.candidates]
        assert (size.num_prompt_tokens, size.answers) == (prompt, tuple(num - prompt for num in lengths))
    [found, _] = fetched(config, 2, example_store, [example_store.put(repeated)])
    assert [example.group for example in found[0]] == [example.group for example in whole]


def with_prompt(scored: ScoredGroup, prompt: Prompt) -> ScoredGroup:
    return replace(scored, group=replace(scored.group, prompt=prompt))


NUM_RANKS = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)
    return tiny_config(folder, "learner.tokens_per_microbatch=120")


@pytest.fixture(scope="module")
def taught_examples(config: RunConfig) -> list[Example]:
    """Answers of many lengths, part of them after an image, some tokens not trained."""
    tokenizer, rng = AutoTokenizer.from_pretrained(config.policy.model), np.random.default_rng(0)
    made = []
    for n in range(11):
        answer = rng.integers(1, 250, size=rng.integers(2, 60)).astype(np.int32)
        asked = prompt(tokenizer, f"row {n}", [image(n)] if n % 3 == 0 else [])
        made.append(Example.of_answer(asked, TokenActions(answer), answer > 50))
    return made


@pytest.fixture
def taught_store(monkeypatch: pytest.MonkeyPatch) -> Store:
    taught_store = Store()
    monkeypatch.setattr(examples, "fetch_or_miss", taught_store.fetch)
    return taught_store


def put(value: object) -> Stored:
    return Stored(pickle.dumps(value))


def fetched_of_taught_shares(
    config: RunConfig, taught_store: Store, stored: Sequence[StoredExample], unlucky: int | None = None
) -> list:
    """What each rank gets."""

    def fetch(rank: int, exchange: Exchange) -> list[SharedExample]:
        entries = TaughtExamples(stored, config)
        return ShareFetcher(rank, NUM_RANKS, exchange).fetch(entries)

    return RanksInThreads(NUM_RANKS, taught_store).each(fetch, unlucky)


def test_each_rank_has_its_share_whole_and_the_counts_of_all(
    config: RunConfig, taught_examples: list[Example], taught_store: Store
) -> None:
    shares = shares_of_ranks(taught_examples, config.learner, NUM_RANKS)
    places = {id(example.candidates[0].sequence): n for n, example in enumerate(taught_examples)}
    for rank, found in enumerate(fetched_of_taught_shares(config, taught_store, stored_examples(taught_examples, put))):
        assert [row.num_trained for row in found] == [row.num_trained for row in taught_examples]
        assert [row.sequence.num_tokens for row in found] == [row.sequence.num_tokens for row in taught_examples]
        own = shares_of_ranks(found, config.learner, NUM_RANKS)[rank]
        assert [len(share) for share in own] == [len(share) for share in shares[rank]]
        for mine, whole in zip(own, shares[rank], strict=True):
            for row, expected in zip(mine, whole, strict=True):
                assert isinstance(row, Example)
                [mine_only], [expected_only] = row.candidates, expected.candidates
                np.testing.assert_array_equal(
                    mine_only.sequence.token_ids, expected_only.sequence.token_ids, strict=True
                )
                np.testing.assert_array_equal(mine_only.mask, expected_only.mask, strict=True)
        taken = {places[id(row.candidates[0].sequence)] for share in shares[rank] for row in share}
        assert {n for n, row in enumerate(found) if isinstance(row, Example)} == taken


def test_each_example_is_fetched_once(config: RunConfig, taught_examples: list[Example], taught_store: Store) -> None:
    stored = stored_examples(taught_examples, put)
    total = sum(len(example.content.content) for example in stored)
    found = fetched_of_taught_shares(config, taught_store, stored)
    num_whole = sum(isinstance(row, Example) for rows in found for row in rows)
    assert len(taught_examples) <= num_whole <= len(taught_examples) + NUM_RANKS, (
        "a row that keeps step with other ranks comes twice"
    )
    assert sum(taught_store.num_bytes.values()) < 1.5 * total


def test_a_rank_receives_the_references_of_its_examples_alone(
    config: RunConfig, taught_examples: list[Example], taught_store: Store
) -> None:
    stored = stored_examples(taught_examples, put)
    outlines, portions = portions_of_examples(stored, NUM_RANKS, config=config)
    assert all(outline.content is ELSEWHERE for outline in outlines)
    assert sum(len(portion.references) for portion in portions) <= len(taught_examples) + NUM_RANKS

    def fetch(rank: int, exchange: Exchange) -> list[SharedExample]:
        entries = TaughtExamples(outlines, config, portions[rank])
        return ShareFetcher(rank, NUM_RANKS, exchange).fetch(entries)

    found, expected = (
        RanksInThreads(NUM_RANKS, taught_store).each(fetch),
        fetched_of_taught_shares(config, taught_store, stored),
    )
    for mine, whole in zip(found, expected, strict=True):
        assert [type(row) for row in mine] == [type(row) for row in whole]


def test_an_example_that_one_rank_cannot_fetch_is_missed_by_all_of_them(
    config: RunConfig, taught_examples: list[Example], taught_store: Store
) -> None:
    found = fetched_of_taught_shares(config, taught_store, stored_examples(taught_examples, put), unlucky=2)
    assert [str(error) for error in found] == ["learner/2: examples of the warm start cannot be had"] * NUM_RANKS


def test_images_are_shared_out_as_answers_are(config: RunConfig, taught_store: Store) -> None:
    noising = Noising(np.linspace(1, 0.1, 10, dtype=np.float32), np.arange(10, dtype=np.float32), "uniform", 2)
    images = [Example.of_image(CleanSequence(np.full((4, 8, 8), n, np.float32), (), noising, n)) for n in range(6)]
    for found in fetched_of_taught_shares(config, taught_store, stored_examples(images, put)):
        whole = [row for row in found if isinstance(row, Example)]
        assert len(whole) == 2 and sum(isinstance(row, ExampleOutline) for row in found) == 4
        assert all(of.sequence.clean[0, 0, 0] == of.sequence.seed for row in whole for of in row.candidates)
