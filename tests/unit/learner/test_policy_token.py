"""TokenPolicy equals the model of transformers; masked tokens change nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import edited, group, image, prompt, tiny_config
from one_learner import connected_learner, copied, largest_difference
from scored_rows import HOT, collated, learner_config, plain_logprobs, policy_at
from transformers import AutoModelForImageTextToText

from mobula.cluster.records.media import MediaSpan
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import PolicyConfig
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.checkpoint import load_policy_model
from mobula.learner.policies.head import PLAIN, Distribution, token_logprobs
from mobula.learner.policies.loading import freeze
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def config(folder: Path) -> PolicyConfig:
    return tiny_config(folder).policy


@pytest.fixture
def policy(folder: Path) -> TokenPolicy:
    return policy_at(folder, "learner.logprob_chunk_tokens=4").eval()


@pytest.fixture
def rows(tokenizer) -> list[TokenSequence]:
    """Text only, one image, two images of different sizes, and a sibling, which ends in a sampled placeholder id; the
    answers differ in length."""
    image_pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    images = [[], [image(1)], [image(2, 2, 4), image(3, 6, 4)]]
    asked = [prompt(tokenizer, f"p{n}", shown) for n, shown in enumerate(images)]
    answers = [[1, 2, 3], [4], [10, 11, 12, 13, 14], [20, 21, image_pad]]
    return [TokenSequence.of_response(p, np.array(a)) for p, a in zip([*asked, asked[2]], answers, strict=True)]


@torch.no_grad()
def test_log_probs_equal_transformers_for_text_one_and_two_images_in_one_batch(policy, folder, rows) -> None:
    """And those of a whole prompt."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = TokenSequence(rows[2].token_ids[: rows[2].num_context], 1, rows[2].media, rows[2].media_spans)
    for batch in (rows[:3], [prompts]):
        found = policy(collated(batch), PLAIN).logprobs
        for row, sequence in zip(found, batch, strict=True):
            own = row[: sequence.num_targets]
            torch.testing.assert_close(own, plain_logprobs(model, sequence), atol=1e-5, rtol=0)
            assert row[sequence.num_targets :].abs().sum() == 0


@torch.no_grad()
def test_a_batch_scores_each_row_as_if_it_were_alone(policy, rows) -> None:
    together = policy(collated(rows), HOT)
    for row, sequence in enumerate(rows):
        alone, n = policy(collated([sequence]), HOT), sequence.num_targets
        torch.testing.assert_close(together.logprobs[row, :n], alone.logprobs[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(together.entropy[row, :n], alone.entropy[0], atol=1e-5, rtol=0)


def test_the_vision_tower_runs_once_a_batch_and_sees_each_image_once(policy, rows) -> None:
    patches = []
    policy.model.model.visual.register_forward_pre_hook(lambda _, args: patches.append(args[0].shape[0]))
    policy(collated(rows), PLAIN)
    assert patches == [16 + 8 + 24]  # four rows, three images, one of the rows a sibling
    policy(collated(rows[:1]), PLAIN).logprobs.sum().backward()
    assert patches[1:] == [4]  # the blank image of a text-only batch
    assert all(p.grad is not None for p in policy.parameters())


def test_a_placeholder_that_no_image_was_recorded_for_is_refused(policy, tokenizer) -> None:
    image_pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    row = TokenSequence.of_response(prompt(tokenizer, "p", [image(1)]), np.array([20, image_pad, 21]))
    with pytest.raises(ValueError, match=f"placeholder {image_pad} outside of its recorded images"):
        policy(collated([row]), PLAIN)
    foreign = TokenSequence(row.token_ids[:-2], row.num_context, (image(1, 6, 4),), row.media_spans)
    with pytest.raises(ValueError, match="spans hold 4 placeholders but the vision tower made 6 embeddings"):
        policy(collated([foreign]), PLAIN)


def test_log_probs_are_those_of_biased_and_divided_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    out = token_logprobs(logits, torch.tensor([0]), Distribution(0.5, (2,)))
    weights = np.exp(np.array([2.0, 4.0, -np.inf, 1.0]))  # a bias of -100 at temperature 0.5 leaves nothing
    p = weights / weights.sum()
    assert out.logprobs.item() == pytest.approx(np.log(p[0]), abs=1e-6)
    assert out.entropy.item() == pytest.approx(-sum(x * np.log(x) for x in p if x > 0), abs=1e-6)
    assert not out.is_argmax.item()
    assert token_logprobs(logits, torch.tensor([1]), Distribution(0.5, (2,))).is_argmax.item()


@pytest.mark.parametrize("entry", ["visual.", "vision"])
def test_freezing_by_checkpoint_prefix_or_part(config, entry: str) -> None:
    model = load_policy_model(config.model_copy(update={"freeze": (entry,)}), torch.float32)
    assert not any(p.requires_grad for p in model.model.visual.parameters())
    assert all(p.requires_grad for p in model.model.language_model.parameters())


def test_freezing_nothing_names_the_nearest_prefixes(config) -> None:
    with pytest.raises(ValueError, match=r"policy\.freeze.*'vision\.'.*visual\."):
        freeze(load_policy_model(config, torch.float32), ("vision.",))


PADDED = "learner.packing=false"  # test_shared_prefixes.py has plans of packed rows
BUDGET = (PADDED, "learner.tokens_per_microbatch=100")


def lengths_of(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 60, size=num).tolist()


def planned(
    lengths: list[int], num_ranks: int, *overrides: str, groups: list[int] | None = None
) -> list[list[tuple[int, ...]]]:
    """The micro-batches of each rank; every row is in one of them."""
    rows = [TokenSequence(np.zeros(n, dtype=np.int32), 1, (), ()) for n in lengths]
    plan = split_microbatches(rows, learner_config(*overrides), num_ranks, groups)
    assert sorted(i for share in plan for batch in share for i in batch) == list(range(len(lengths)))
    return plan


def loads(plan: list[list[tuple[int, ...]]], costs: list[float]) -> list[float]:
    return [sum(costs[i] for batch in share for i in batch) for share in plan]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_row_is_in_one_microbatch_and_ranks_have_equally_many(num_ranks: int) -> None:
    lengths = lengths_of(37, seed=num_ranks)
    plan = planned(lengths, num_ranks, *BUDGET)
    assert len({len(share) for share in plan}) == 1
    batches = [batch for share in plan for batch in share if len(batch) > 1]
    assert all(max(lengths[i] for i in batch) * len(batch) <= 100 for batch in batches)
    assert np.ptp(loads(plan, lengths)) <= 2 * max(lengths)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("attention_cost", [0.0, 1e-3])
def test_ranks_compute_alike_where_some_rows_are_eight_times_as_long(num_ranks: int, attention_cost: float) -> None:
    """An eighth of the rows is long, as responses are in RL of reasoning."""
    sizes = np.random.default_rng(num_ranks).integers(100, 200, size=16 * num_ranks)
    lengths = [int(n * (8 if i % 8 == 0 else 1)) for i, n in enumerate(sizes)]
    words = (f"learner.attention_token_cost={attention_cost}", "learner.tokens_per_microbatch=2000")
    costs = [n * (1 + attention_cost * n) for n in lengths]
    assert max(loads(planned(lengths, num_ranks, PADDED, *words), costs)) <= 1.1 * sum(costs) / num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_siblings_stay_on_one_rank_where_parts_allow_it(num_ranks: int) -> None:
    lengths = lengths_of(48, seed=num_ranks)
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(12), 4)).tolist()
    plan = planned(lengths, num_ranks, *BUDGET, groups=groups)
    held = [{groups[i] for batch in share for i in batch} for share in plan]
    assert sum(map(len, held)) <= 12 + num_ranks - 1, "no more than the groups at the borders are on two ranks"
    assert np.ptp(loads(plan, lengths)) <= 2 * max(lengths)
    for share in plan:
        found = [lengths[i] for batch in share for i in batch]
        assert found == sorted(found), "neighbours in a micro-batch are alike"


def test_groups_with_images_of_their_own_are_shared_out_by_these() -> None:
    rows = [
        TokenSequence(np.zeros(length, np.int32), 5, (image(n // 5),), (MediaSpan(1, 5),))
        for n, length in enumerate(np.random.default_rng(0).integers(9, 60, size=30))
    ]
    config, groups = learner_config(*BUDGET, "learner.image_token_cost=3"), [n // 5 for n in range(30)]
    assert split_microbatches(rows, config, 3, groups) == split_microbatches(rows, config, 3)


def test_one_row_longer_than_the_budget_goes_alone_and_idle_ranks_keep_step() -> None:
    assert planned([500], 2, "learner.tokens_per_microbatch=100") in ([[(0,)], [()]], [[()], [(0,)]])


MASKS = ([True, True, False, False, True], [True, False, False, True])
REFERENCE = ("algorithm.kl.coef=0.1", "resources.reference.num_workers=1")


def episodes(tokenizer, garbage: float) -> ScoredGroup:
    """Two episodes; log-probs of the policy and of the reference under False are `garbage`."""
    scored = group(prompt(tokenizer, "a", [image(1)]), [[1, 2, 60, 61, 3], [4, 62, 63, 5]], [1.0, 0.0])
    masks = [np.array(mask) for mask in MASKS]
    logprobs = [np.where(mask, -5.0, garbage).astype(np.float32) for mask in masks]
    references = [np.where(mask, -5.2, -garbage).astype(np.float32) for mask in masks]
    made = edited(scored, action_mask=masks, behavior_logprobs=logprobs)
    return dataclasses.replace(made, reference_logprobs=references)


@pytest.mark.parametrize(
    "words",
    [
        REFERENCE,
        ("algorithm=reinforce_pp", "algorithm.kl.coef=0.1", "resources.reference.num_workers=1"),
        (*REFERENCE, "algorithm.loss=gspo", "algorithm.old_logprobs=recomputed", "algorithm.correction=tis_sequence"),
        ("algorithm=ppo_gae", "resources.reference.num_workers=1", "algorithm.critic.learning_rate=0.001"),
    ],
)
def test_garbage_at_masked_tokens_leaves_the_update_as_it_is(folder: Path, tokenizer, words: tuple[str, ...]) -> None:
    found = []
    for garbage in (0.0, -7.5):
        learner = connected_learner(tiny_config(folder, *words))
        learner.begin_rl()
        metrics = learner.update([episodes(tokenizer, garbage)], 1).metrics
        found.append((dict(metrics), copied(learner)))
    (metrics, weights), (other_metrics, others) = found
    assert metrics["loss"] != 0 and metrics == pytest.approx(other_metrics, abs=1e-7)
    assert largest_difference(weights, others) == 0
