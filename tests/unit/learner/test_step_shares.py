"""Each rank fetches what it trains; what the others have fetched reaches it as outlines that credit computes with."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flow_run import latent_actions, latent_group, latent_prompt
from learner_data import cut_off, edited, group, image, prompt, random_groups, tiny_config
from offline_rows import config_of, rows
from ranks_in_threads import RanksInThreads, Store, Stored
from scored_rows import reader

from mobula.cluster.errors import WrongGroupError
from mobula.cluster.records.actions import LatentActions, TokenActions
from mobula.cluster.records.trajectory import MediaSpan, Prompt, Reward, ScoredGroup
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

CPU = torch.device("cpu")
Steps = list[list[LearnerItem]]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Where groups, rows and examples are fetched from."""
    store = Store()
    for module in (batch, examples):
        monkeypatch.setattr(module, "fetch_or_miss", store.fetch)
    return store


class Ranks(RanksInThreads):
    """Ranks that fetch a step."""

    def __init__(self, config: RunConfig, num: int, store: Store) -> None:
        super().__init__(num, store)
        self._config = config

    def fetch(
        self,
        groups: Sequence[ScoredGroup],
        version: int,
        unlucky: int | None = None,
        portions: Sequence[Portion] | None = None,
    ) -> list[Any]:
        """What each rank gets, or its error; for `unlucky` every fetch fails."""

        def fetched(rank: int, exchange: Exchange) -> Steps:
            entries = StepGroups(groups, version, self._config, portion=portions and portions[rank])
            return ShareFetcher(rank, self.num, exchange).fetch(entries)

        return self.each(fetched, unlucky)

    async def called(self, groups: Sequence[ScoredGroup], version: int) -> tuple[list[Steps], list[Sequence[Portion]]]:
        """What each rank gets from its references, and the portions of each call."""

        def fetch(outlines: Sequence[ScoredGroup], portions: Sequence[Portion]) -> list[Any]:
            return self.fetch(outlines, version, portions=portions)

        return await called_in_portions(fetch, groups, version, self.num, planner_of(self._config))


async def called_in_portions(
    fetch: Callable[[Sequence[ScoredGroup], Sequence[Portion]], list[Any]],
    groups: Sequence[ScoredGroup],
    version: int,
    num_ranks: int,
    planned: Callable,
) -> tuple[list[Any], list[Sequence[Portion]]]:
    """What each rank gets from its references, and the portions of each call; the error of one rank is raised."""
    calls: list[Sequence[Portion]] = []

    async def call(outlines: Sequence[ScoredGroup], portions: Sequence[Portion]) -> list[Any]:
        calls.append(portions)
        found = fetch(outlines, portions)
        for error in found:
            if isinstance(error, Exception):
                raise error
        return found

    put = lambda value: pickle.loads(pickle.dumps(value))  # noqa: E731
    return await in_portions(call, groups, version, num_ranks=num_ranks, planned=planned, put=put), calls


def with_references(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """With random log-probs of a reference."""
    rng = np.random.default_rng(0)
    return [
        replace(
            g, reference_logprobs=[rng.normal(-5.0, 0.2, t.num_steps).astype(np.float32) for t in g.group.trajectories]
        )
        for g in groups
    ]


def is_whole(item: LearnerItem) -> bool:
    return not isinstance(item.sequence, RowOutline)


def flat(steps: Steps) -> list[LearnerItem]:
    return [item for row in steps for item in row]


def wholes(steps: Steps) -> set[int]:
    """The items that a rank has fetched."""
    return {item.index for item in flat(steps) if is_whole(item)}


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
    stored = store.put(with_references(large_groups(tokenizer, 24)))
    sizes = [len(g.group.content) + len(g.reference_logprobs.content) for g in stored]
    ranks = Ranks(tiny_config(folder, "algorithm.kl.coef=0.01"), num_ranks, store)
    ranks.fetch(stored, 1)
    fetched, total, largest = store.num_bytes.values(), sum(sizes), max(sizes)  # a group is fetched whole
    assert len(fetched) == num_ranks
    assert total / num_ranks - 2 * largest <= min(fetched) <= max(fetched) <= total / num_ranks + 2 * largest
    assert sum(fetched) <= total + (num_ranks - 1) * largest
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
async def test_every_rank_computes_what_it_would_with_all_groups(folder, tokenizer, store, words) -> None:
    """Also a rank that has the references of its share alone."""
    config = tiny_config(folder, "learner.tokens_per_microbatch=60", *words)
    groups = []
    for g in with_references([cut_off(g) for g in random_groups(tokenizer, 7, 3, seed=11)]):
        parts = [{"accuracy": reward.value, "format": n / 3} for n, reward in enumerate(g.rewards)]
        rewards = (Reward(r.value, own) for r, own in zip(g.rewards, parts, strict=True))
        groups.append(replace(g, rewards=tuple(rewards)))
    groups[3] = replace(groups[3], rewards=(None, None, None))
    expected = fetch_items(groups, 0, 1.0)
    wanted = wanted_by_rank(expected, config, 1, 3)
    stored, ranks = store.put(groups), Ranks(config, 3, store)
    of_portions, calls = await ranks.called(stored, 1)
    misleads = config.algorithm.overlong_filter  # no summary says which responses were cut off
    assert len(calls) == 1 or misleads
    for rank, (found, same) in enumerate(zip(ranks.fetch(stored, 1), of_portions, strict=True)):
        assert wanted_by_rank(found, config, 1, 3) == wanted, "rows are shared out as before"
        assert wholes(same) >= wanted[rank] <= wholes(found) and (wholes(same) == wholes(found) or misleads)
        assert len(wholes(found)) < len(flat(found)) or len(wanted[rank]) > len(flat(found)) / 2
        for own in (found, same):
            assert_equal_credit(config, own, expected)
    for portions in calls:
        assert all(len(portion.references) < len(groups) for portion in portions) or misleads
        assert set().union(*(portion.references for portion in portions)) == set(range(len(groups)))


def assert_equal_credit(config: RunConfig, found: Steps, expected: Steps) -> None:
    """Advantages, masks and metrics, bit for bit."""
    if config.algorithm.critic.is_on:
        found, expected = (with_values(groups) for groups in (found, expected))
    ours, theirs = (Credit(config).assign(groups) for groups in (found, expected))
    assert ours.metrics == theirs.metrics
    for one, other in zip(flat(ours.groups), flat(theirs.groups), strict=True):
        for name in ("index", "group", "is_truncated", "reward"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("loss_mask", "kept_mask", "policy_mask", "ages", "advantages", "returns"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)


def with_values(groups: Steps) -> Steps:
    rng = np.random.default_rng(0)
    return [
        [replace(i, values=rng.normal(size=i.sequence.num_targets + 1).astype(np.float32)) for i in row]
        for row in groups
    ]


def test_distillation_has_the_log_probs_of_all_rows(folder, tokenizer, store, tmp_path: Path) -> None:
    teacher = write_tiny_qwen2_5_vl(tmp_path / "teacher", seed=1)
    config = tiny_config(folder, "algorithm=distill", f"algorithm.distillation.teacher={teacher}")
    groups = with_references(random_groups(tokenizer, 6, 2))
    for found in Ranks(config, 2, store).fetch(store.put(groups), 1):
        assert_equal_credit(config, found, fetch_items(groups, 0, 1.0))


@pytest.mark.parametrize("num_ranks", [4, 16, 64])
def test_the_references_of_all_ranks_grow_with_the_groups_alone(folder, tokenizer, num_ranks: int) -> None:
    groups = large_groups(tokenizer, 2 * num_ranks, num_siblings=2, longest=12)
    held = planner_of(tiny_config(folder))(groups, 1, num_ranks)
    assert sum(map(len, held)) <= 2 * len(groups), "a group has two siblings, each of which one rank trains"


async def test_media_of_later_turns_are_fetched_although_no_summary_has_them(folder, tokenizer, store) -> None:
    """A rank first fetches other groups than it trains; without the references of these it is called again."""
    config = tiny_config(folder, "learner.image_token_cost=5", "learner.tokens_per_microbatch=60")
    groups, later = random_groups(tokenizer, 6, 2, seed=2, longest=4), []
    for n, g in enumerate(groups):
        media = {"media": (image(50 + n, 6, 4),), "media_spans": (MediaSpan(0, 1 + 200 * (n % 2)),)}
        later.append(edited(g, actions=[replace(t.actions, **media) for t in g.group.trajectories]))
    wanted, planned = (wanted_by_rank(fetch_items(some, 0, 1.0), config, 1, 2) for some in (later, groups))
    assert wanted != planned, "the summaries mislead here"
    ranks, stored = Ranks(config, 2, store), store.put(later)
    found, calls = await ranks.called(stored, 1)
    for rank, steps in enumerate(zip(ranks.fetch(stored, 1), found, strict=True)):
        assert all(wholes(own) >= wanted[rank] for own in steps)
    assert [portion.is_final for portions in calls for portion in portions] == [False, False, True, True]
    assert all(len(more.references) >= len(first.references) for first, more in zip(*calls, strict=True))


def test_a_group_with_another_content_than_reported_is_refused_by_all_ranks_at_once(folder, tokenizer, store) -> None:
    """Two ranks fetch each group once: one rank alone reads the altered one."""
    groups = [replace(scored, summary=scored.group.summary()) for scored in random_groups(tokenizer, 4, 2)]
    stored = store.put(groups)
    altered = [*stored[:1], replace(stored[1], group=stored[2].group), *stored[2:]]
    found = Ranks(tiny_config(folder), 2, store).fetch(altered, 1)
    assert [type(error) for error in found] == [WrongGroupError] * 2
    assert str(found[0]) == str(found[1])
    assert f"group {groups[1].summary.group_id} has sha256" in str(found[0])


def test_a_step_without_any_reward_is_known_to_all(folder, tokenizer, store) -> None:
    groups = [group(prompt(tokenizer, f"g{n}"), [[1, 2], [3]], [None, None], n) for n in range(3)]
    for found in Ranks(tiny_config(folder), 2, store).fetch(store.put(groups), 1):
        assert [i.sequence.num_targets for i in flat(found)] == [2, 1] * 3
        assert not any(i.loss_mask.any() for i in flat(found))


def drawn_groups(*siblings: Sequence[LatentActions]) -> list[ScoredGroup]:
    """Of a flow model: two images for each prompt."""
    made = [latent_group(latent_prompt(f"a cat {n}"), both) for n, both in enumerate(siblings)]
    return [ScoredGroup(g.summary(), g, (Reward(1.0), Reward(0.0))) for g in made]


def test_latents_stay_with_the_rank_that_trains_them(folder, store) -> None:
    groups = drawn_groups(*([latent_actions(2 * n), latent_actions(2 * n + 1)] for n in range(4)))
    for found in Ranks(tiny_config(folder), 2, store).fetch(store.put(groups), 3):
        assert len(wholes(found)) == 4, "half of them"
        for item, other in zip(flat(found), flat(fetch_items(groups, 2, 1.0)), strict=True):
            assert item.sequence.num_tokens == other.sequence.num_tokens == 3 * 4
            np.testing.assert_array_equal(item.ages, other.ages, strict=True)


def test_what_a_flow_model_predicted_is_kept_by_the_rank_that_trains_the_row(folder, store) -> None:
    """DiffusionNFT's scoring pass hands every rank the predictions of all rows."""
    groups = drawn_groups(*([latent_actions(n)] * 2 for n in range(4)))
    predicted, nothing = np.ones((3, 1, 2, 2), np.float32), np.empty(0, np.float32)
    for found in Ranks(tiny_config(folder), 2, store).fetch(store.put(groups), 3):
        rows = [with_scores(i, {i.index: (nothing, nothing, predicted)}).sequence for i in flat(found)]
        whole = [row for row in rows if not isinstance(row, RowOutline)]
        assert len(rows) == 8 and len(whole) == 4
        assert all(row.old is predicted for row in whole)


def test_a_row_of_another_rank_cannot_be_put_into_a_batch(folder, tokenizer, store) -> None:
    found, _ = Ranks(tiny_config(folder), 2, store).fetch(store.put(random_groups(tokenizer, 4, 2)), 1)
    outlined = [i for i in flat(found) if not is_whole(i)]
    with pytest.raises(AssertionError, match="a row of another rank"):
        collate_items(outlined[:1], reader(), CPU)
    [part], _ = fetched(config_of(folder, "sft"), 2, store, store.put(rows(tokenizer, "sft")))
    outlined = [example for example in part if not isinstance(example, Example)]
    with pytest.raises(AssertionError, match="an example of another rank"):
        collate_examples(outlined[:1], reader(), CPU)


def test_one_rank_fetches_everything(folder, tokenizer, store) -> None:
    [found] = Ranks(tiny_config(folder), 1, store).fetch(store.put(random_groups(tokenizer, 3, 2)), 1)
    assert all(map(is_whole, flat(found)))


def test_what_one_rank_cannot_fetch_is_missed_by_all_of_them(folder, tokenizer, store, taught: Taught) -> None:
    groups = Ranks(tiny_config(folder), 2, store).fetch(store.put(random_groups(tokenizer, 4, 2)), 1, unlucky=1)
    of_job = fetched(config_of(folder, "sft"), 2, store, store.put(rows(tokenizer, "sft")), unlucky=1)
    examples = taught.fetched(store, unlucky=2)
    found = {"groups": groups, "rows": of_job, "examples of the warm start": examples}
    for what, errors in found.items():
        ranks = len(errors)
        assert [str(error) for error in errors] == [f"learner/{ranks - 1}: {what} cannot be had"] * ranks


Parts = list[list[SharedExample]]


def fetched(
    config: RunConfig,
    num_ranks: int,
    store: Store,
    *parts: Sequence[ScoredGroup],
    portions: Sequence[Portion] | None = None,
    unlucky: int | None = None,
) -> list[Any]:
    """What each rank gets of an offline job, or its error."""
    row = build_objective(config, PLAIN).row

    def fetch(rank: int, exchange: Exchange) -> Parts:
        entries = DataRows(parts, config, row, portions and portions[rank])
        return entries.in_parts(ShareFetcher(rank, num_ranks, exchange).fetch(entries))

    return RanksInThreads(num_ranks, store).each(fetch, unlucky)


def own_rows(part: list[SharedExample], config: RunConfig, rank: int, num_ranks: int) -> list[list[int]]:
    """The places in a part of the rows of each of its micro-batches."""
    shares = shares_of_ranks(part, config.learner, num_ranks)[rank]
    places = {id(example): n for n, example in enumerate(part)}
    return [[places[id(example)] for example in share if id(example) in places] for share in shares]


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model", "regression"])
def test_each_rank_has_its_share_whole_and_the_totals_of_all(folder, tokenizer, store, job: str) -> None:
    config = config_of(folder, job, "learner.tokens_per_microbatch=120")
    parts = [rows(tokenizer, job, num=7, seed=1), rows(tokenizer, job, num=4, seed=2)]
    row = build_objective(config, PLAIN).row
    expected = [fetch_examples(part, row, 1.0) for part in parts]
    found = fetched(config, 3, store, *map(store.put, parts))
    for rank, theirs in enumerate(found):
        for part, whole in zip(theirs, expected, strict=True):
            assert totals_of(part) == totals_of(whole)
            shares = own_rows(part, config, rank, 3)
            assert shares == own_rows(whole, config, rank, 3), "rows are shared out as with all of them at hand"
            for n in (n for share in shares for n in share):
                assert_same_example(part[n], whole[n])
    assert not all(isinstance(example, Example) for part in found[0] for example in part)


def assert_same_example(one: SharedExample, other: Example) -> None:
    assert isinstance(one, Example)
    for mine, whole in zip(one.candidates, other.candidates, strict=True):
        np.testing.assert_array_equal(mine.sequence.token_ids, whole.sequence.token_ids, strict=True)
        np.testing.assert_array_equal(mine.mask, whole.mask, strict=True)
        assert mine.label == whole.label


def test_two_ranks_fetch_each_row_once(folder, tokenizer, store) -> None:
    """Prompts are not shared here: that two rows have the same one is known once they are fetched."""
    stored = store.put(rows(tokenizer, "dpo", num=40))
    total = sum(len(g.group.content) + len(g.reference_logprobs.content) for g in stored)
    fetched(config_of(folder, "dpo", "learner.share_prompts=false"), 2, store, stored)
    assert len(store.num_bytes) == 2 and sum(store.num_bytes.values()) == total
    assert max(store.num_bytes.values()) < 0.7 * total


async def fetched_in_portions(
    config: RunConfig, num_ranks: int, store: Store, stored: list[ScoredGroup]
) -> tuple[list[Parts], list[Sequence[Portion]]]:
    def fetch(outlines: Sequence[ScoredGroup], portions: Sequence[Portion]) -> list[Any]:
        return fetched(config, num_ranks, store, outlines, portions=portions)

    return await called_in_portions(fetch, stored, 1, num_ranks, planners_of(config).groups)


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model", "regression"])
async def test_a_rank_receives_the_references_of_its_rows_alone(folder, tokenizer, store, job: str) -> None:
    """The sizes that summaries predict are exact: one call."""
    config = config_of(folder, job, "learner.tokens_per_microbatch=120", "learner.share_prompts=false")
    stored = store.put(rows(tokenizer, job, num=12, seed=1))
    found, [portions] = await fetched_in_portions(config, 3, store, stored)
    assert sum(len(portion.references) for portion in portions) < 1.5 * len(stored)
    assert set().union(*(portion.references for portion in portions)) == set(range(len(stored)))
    [[everything]] = fetched(config, 1, store, stored)
    for rank, [mine] in enumerate(found):
        assert totals_of(mine) == totals_of(everything)
        assert own_rows(mine, config, rank, 3) == own_rows(everything, config, rank, 3)
        whole = {n for n, example in enumerate(mine) if isinstance(example, Example)}
        assert whole == set(portions[rank].references)


async def test_rows_with_one_prompt_are_assigned_again_once_that_is_known(folder, tokenizer, store) -> None:
    config = config_of(folder, "sft", "learner.packing=true", "learner.share_prompts=true")
    groups = rows(tokenizer, "sft", num=12, seed=1)
    stored = store.put([with_prompt(scored, groups[n % 3].group.prompt) for n, scored in enumerate(groups)])
    found, calls = await fetched_in_portions(config, 2, store, stored)
    assert [all(portion.is_final for portion in portions) for portions in calls] == [False, True]
    [[everything]] = fetched(config, 1, store, stored)
    for rank, [mine] in enumerate(found):
        assert own_rows(mine, config, rank, 2) == own_rows(everything, config, rank, 2)


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model"])
def test_examples_of_one_prompt_compute_it_once(folder, tokenizer, store, job: str) -> None:
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
    [found], _ = fetched(config, 2, store, store.put(repeated))
    assert [example.group for example in found] == [example.group for example in whole]


def with_prompt(scored: ScoredGroup, prompt: Prompt) -> ScoredGroup:
    return replace(scored, group=replace(scored.group, prompt=prompt))


NUM_RANKS = 3


@dataclass(frozen=True)
class Taught:
    """Examples of a warm start, and how ranks fetch them."""

    config: RunConfig
    examples: list[Example]

    @property
    def stored(self) -> list[StoredExample]:
        return stored_examples(self.examples, lambda value: Stored(pickle.dumps(value)))

    def fetched(
        self,
        store: Store,
        stored: Sequence[StoredExample] | None = None,
        portions: Sequence[Portion] | None = None,
        unlucky: int | None = None,
    ) -> list[Any]:
        """What each rank gets, or its error."""

        def fetch(rank: int, exchange: Exchange) -> list[SharedExample]:
            entries = TaughtExamples(stored or self.stored, self.config, portions and portions[rank])
            return ShareFetcher(rank, NUM_RANKS, exchange).fetch(entries)

        return RanksInThreads(NUM_RANKS, store).each(fetch, unlucky)


@pytest.fixture(scope="module")
def taught(folder: Path, tokenizer) -> Taught:
    """Answers of many lengths, part of them after an image, some tokens not trained."""
    rng, made = np.random.default_rng(0), []
    for n in range(11):
        answer = rng.integers(1, 250, size=rng.integers(2, 60)).astype(np.int32)
        asked = prompt(tokenizer, f"row {n}", [image(n)] if n % 3 == 0 else [])
        made.append(Example.of_answer(asked, TokenActions(answer), answer > 50))
    return Taught(tiny_config(folder, "learner.tokens_per_microbatch=120"), made)


def test_each_rank_has_its_share_whole_and_the_counts_of_all(taught: Taught, store) -> None:
    shares = shares_of_ranks(taught.examples, taught.config.learner, NUM_RANKS)
    places = {id(example.candidates[0].sequence): n for n, example in enumerate(taught.examples)}
    for rank, found in enumerate(taught.fetched(store)):
        for row, whole in zip(found, taught.examples, strict=True):
            assert (row.num_trained, row.sequence.num_tokens) == (whole.num_trained, whole.sequence.num_tokens)
        own = shares_of_ranks(found, taught.config.learner, NUM_RANKS)[rank]
        for mine, expected in zip(own, shares[rank], strict=True):
            for row, whole in zip(mine, expected, strict=True):
                assert_same_example(row, whole)
        taken = {places[id(row.candidates[0].sequence)] for share in shares[rank] for row in share}
        assert {n for n, row in enumerate(found) if isinstance(row, Example)} == taken


def test_each_example_is_fetched_once(taught: Taught, store) -> None:
    """A row that keeps step with other ranks comes twice."""
    num_whole = sum(isinstance(row, Example) for rows in taught.fetched(store) for row in rows)
    assert len(taught.examples) <= num_whole <= len(taught.examples) + NUM_RANKS
    assert sum(store.num_bytes.values()) < 1.5 * sum(len(example.content.content) for example in taught.stored)


def test_a_rank_receives_the_references_of_its_examples_alone(taught: Taught, store) -> None:
    outlines, portions = portions_of_examples(taught.stored, NUM_RANKS, config=taught.config)
    assert all(outline.content is ELSEWHERE for outline in outlines)
    assert sum(len(portion.references) for portion in portions) <= len(taught.examples) + NUM_RANKS
    for mine, whole in zip(taught.fetched(store, outlines, portions), taught.fetched(store), strict=True):
        assert [type(row) for row in mine] == [type(row) for row in whole]


def test_images_are_shared_out_as_answers_are(taught: Taught, store) -> None:
    noising = Noising(np.linspace(1, 0.1, 10, dtype=np.float32), np.arange(10, dtype=np.float32), "uniform", 2)
    images = [Example.of_image(CleanSequence(np.full((4, 8, 8), n, np.float32), (), noising, n)) for n in range(6)]
    for found in Taught(taught.config, images).fetched(store):
        whole = [row for row in found if isinstance(row, Example)]
        assert len(whole) == 2 and sum(isinstance(row, ExampleOutline) for row in found) == 4
        assert all(of.sequence.clean[0, 0, 0] == of.sequence.seed for row in whole for of in row.candidates)
