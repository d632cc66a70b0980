"""TokenPolicy equals the model of transformers; masked tokens change nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import group, image, prompt, tiny_config, with_logprobs
from one_learner import connected_learner, copied
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mobula.cluster.records.media import MediaHandle, MediaReader, MediaSpan
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.load import load_config
from mobula.configs.schema import LearnerConfig, PolicyConfig
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.checkpoint import load_policy_model, save_policy
from mobula.learner.policies.head import PLAIN, Distribution, token_logprobs
from mobula.learner.policies.loading import checkpoint_names, freeze
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy

CPU = torch.device("cpu")
HOT = Distribution(0.7, (5, 9))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def config(folder: Path) -> PolicyConfig:
    return tiny_config(folder).policy


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def policy(config: PolicyConfig) -> TokenPolicy:
    return TokenPolicy(
        load_policy_model(config, torch.float32), learner_config("learner.logprob_chunk_tokens=4")
    ).eval()


PADDED = "learner.packing=false"  # plans of padded rows; tests/unit/learner/test_shared_prefixes.py has packed ones


def learner_config(*overrides: str) -> LearnerConfig:
    return load_config(["experiment=digits", *overrides]).learner


def reader() -> MediaReader:
    return MediaReader(timeout_s=1, max_items=8)


def mixed_sequences(tokenizer) -> list[TokenSequence]:
    """Text only, one image, two images of different sizes, and a sibling; the answers differ in length."""
    image_pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    images = [[], [image(1)], [image(2, 2, 4), image(3, 6, 4)]]
    asked = [prompt(tokenizer, f"p{n}", shown) for n, shown in enumerate(images)]
    answers = [[1, 2, 3], [4], [10, 11, 12, 13, 14], [20, 21, image_pad]]
    prompts = [*asked, asked[2]]
    return [TokenSequence.of_response(p, np.array(a)) for p, a in zip(prompts, answers, strict=True)]


def plain_logprobs(model, sequence: TokenSequence) -> torch.Tensor:
    """transformers' own forward on one unpadded row: log-probs of every token after the first. [S - 1]"""
    ids = torch.from_numpy(sequence.token_ids).long()[None]
    types = torch.zeros_like(ids)
    for span in sequence.media_spans:
        types[0, span.start : span.end] = 1
    media = [handle.reference.inputs for handle in sequence.media]
    names = ("pixel_values", "image_grid_thw") if media else ()
    inputs = {name: torch.from_numpy(np.concatenate([m[name] for m in media])) for name in names}
    logits = model(input_ids=ids, mm_token_type_ids=types, **inputs).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def test_log_probs_equal_transformers_for_text_one_and_two_images_in_one_batch(policy, folder, tokenizer) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    image_pad = model.config.image_token_id
    sequences = [s for s in mixed_sequences(tokenizer) if image_pad not in s.token_ids[s.num_context :]]
    output = policy(collate(sequences, reader(), CPU), PLAIN)
    for row, sequence in enumerate(sequences):
        expected = plain_logprobs(model, sequence)[sequence.num_context - 1 :]
        torch.testing.assert_close(output.logprobs[row, : sequence.num_targets], expected, atol=1e-5, rtol=0)
        assert output.logprobs[row, sequence.num_targets :].abs().sum() == 0


@torch.no_grad()
def test_a_whole_prompt_is_scored_like_transformers_scores_it(policy, folder, tokenizer) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    sequence = TokenSequence.of_prompt(prompt(tokenizer, "c", [image(2, 2, 4), image(3, 6, 4)]))
    scored = policy(collate([sequence], reader(), CPU), PLAIN).logprobs[0]
    torch.testing.assert_close(scored, plain_logprobs(model, sequence), atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_batch_scores_each_row_as_if_it_were_alone(policy, tokenizer) -> None:
    sequences = mixed_sequences(tokenizer)  # one row ends in a sampled placeholder id, which no token looks at
    together = policy(collate(sequences, reader(), CPU), HOT)
    for row, sequence in enumerate(sequences):
        alone = policy(collate([sequence], reader(), CPU), HOT)
        n = sequence.num_targets
        torch.testing.assert_close(together.logprobs[row, :n], alone.logprobs[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(together.entropy[row, :n], alone.entropy[0], atol=1e-5, rtol=0)


def test_the_vision_tower_runs_once_a_batch_and_sees_each_image_once(policy, tokenizer) -> None:
    patches = []
    policy.model.model.visual.register_forward_pre_hook(lambda _, args: patches.append(args[0].shape[0]))
    policy(collate(mixed_sequences(tokenizer), reader(), CPU), PLAIN)
    assert patches == [16 + 8 + 24]  # four rows, three images, one of the rows a sibling
    policy(collate(mixed_sequences(tokenizer)[:1], reader(), CPU), PLAIN)
    assert patches[1:] == [4]  # the blank image of a text-only batch


def test_text_only_batches_reach_every_parameter_and_move_no_vision_weight(policy, tokenizer) -> None:
    policy(collate(mixed_sequences(tokenizer)[:1], reader(), CPU), PLAIN).logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())
    assert all(p.grad.abs().max() == 0 for p in policy.model.model.visual.parameters())


def test_a_placeholder_that_no_image_was_recorded_for_is_refused(policy, tokenizer) -> None:
    image_pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    row = TokenSequence.of_response(prompt(tokenizer, "p", [image(1)]), np.array([20, image_pad, 21]))
    with pytest.raises(ValueError, match=f"placeholder {image_pad} outside of its recorded images"):
        policy(collate([row], reader(), CPU), PLAIN)
    foreign = TokenSequence(row.token_ids[:-2], row.num_context, (image(1, 6, 4),), row.media_spans)
    with pytest.raises(ValueError, match="spans hold 4 placeholders but the vision tower made 6 embeddings"):
        policy(collate([foreign], reader(), CPU), PLAIN)


def test_gradients_reach_the_vision_tower_through_shared_images(policy, tokenizer) -> None:
    sequences = mixed_sequences(tokenizer)[2:]
    policy(collate(sequences, reader(), CPU), PLAIN).logprobs.sum().backward()
    together = [p.grad.clone() for p in policy.model.model.visual.parameters()]
    policy.zero_grad()
    for sequence in sequences:
        policy(collate([sequence], reader(), CPU), PLAIN).logprobs.sum().backward()
    for whole, parts in zip(together, policy.model.model.visual.parameters(), strict=True):
        torch.testing.assert_close(whole, parts.grad, atol=1e-4, rtol=1e-4)
    assert max(g.abs().max() for g in together) > 0


def test_log_probs_are_those_of_biased_and_divided_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    out = token_logprobs(logits, torch.tensor([0]), Distribution(0.5, (2,)))
    weights = np.exp(np.array([2.0, 4.0, -np.inf, 1.0]))  # a bias of -100 at temperature 0.5 leaves nothing
    p = weights / weights.sum()
    assert out.logprobs.item() == pytest.approx(np.log(p[0]), abs=1e-6)
    assert out.entropy.item() == pytest.approx(-sum(x * np.log(x) for x in p if x > 0), abs=1e-6)
    assert not out.is_argmax.item()
    assert token_logprobs(logits, torch.tensor([1]), Distribution(0.5, (2,))).is_argmax.item()


def test_checkpoint_names_are_those_of_the_file(folder, config) -> None:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(checkpoint_names(load_policy_model(config, torch.float32)).values()) == set(file.keys())


@pytest.mark.parametrize("entry", ["visual.", "vision"])
def test_freezing_by_checkpoint_prefix_or_part(config, entry: str) -> None:
    model = load_policy_model(config.model_copy(update={"freeze": (entry,)}), torch.float32)
    assert not any(p.requires_grad for p in model.model.visual.parameters())
    assert all(p.requires_grad for p in model.model.language_model.parameters())


def test_freezing_nothing_names_the_nearest_prefixes(config) -> None:
    with pytest.raises(ValueError, match=r"policy\.freeze.*'vision\.'.*visual\."):
        freeze(load_policy_model(config, torch.float32), ("vision.",))


def test_a_saved_policy_loads_equal_with_its_processor(config, folder, tmp_path) -> None:
    model = load_policy_model(config, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.25)
    save_policy(model, str(folder), tmp_path / "saved", model.state_dict(), model.state_dict().items())
    loaded = load_policy_model(config.model_copy(update={"model": str(tmp_path / "saved")}), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    names = lambda path: {file.name for file in path.iterdir()}  # noqa: E731
    assert names(tmp_path / "saved") == names(folder)


def rows_of(lengths: list[int]) -> list[TokenSequence]:
    return [TokenSequence(np.zeros(n, dtype=np.int32), 1, (), ()) for n in lengths]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_row_is_in_one_microbatch_and_ranks_have_equally_many(num_ranks: int) -> None:
    lengths = np.random.default_rng(num_ranks).integers(2, 60, size=37).tolist()
    plan = split_microbatches(rows_of(lengths), learner_config(PADDED, "learner.tokens_per_microbatch=100"), num_ranks)
    assert len({len(share) for share in plan}) == 1
    assert sorted(i for share in plan for batch in share for i in batch) == list(range(37))
    batches = [batch for share in plan for batch in share if len(batch) > 1]
    assert all(max(lengths[i] for i in batch) * len(batch) <= 100 for batch in batches)
    loads = [sum(lengths[i] for batch in share for i in batch) for share in plan]
    assert max(loads) - min(loads) <= 2 * max(lengths)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("attention_cost", [0.0, 1e-3])
def test_ranks_compute_alike_where_some_rows_are_eight_times_as_long(num_ranks: int, attention_cost: float) -> None:
    """An eighth of the rows is long, as responses are in RL of reasoning."""
    rng = np.random.default_rng(num_ranks)
    lengths = [int(n * (8 if i % 8 == 0 else 1)) for i, n in enumerate(rng.integers(100, 200, size=16 * num_ranks))]
    config = learner_config(
        PADDED, f"learner.attention_token_cost={attention_cost}", "learner.tokens_per_microbatch=2000"
    )
    plan = split_microbatches(rows_of(lengths), config, num_ranks)
    costs = [n * (1 + attention_cost * n) for n in lengths]
    loads = [sum(costs[i] for batch in share for i in batch) for share in plan]
    assert max(loads) <= 1.1 * sum(loads) / num_ranks
    assert sorted(i for share in plan for batch in share for i in batch) == list(range(len(lengths)))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_siblings_stay_on_one_rank_where_parts_allow_it(num_ranks: int) -> None:
    lengths = np.random.default_rng(num_ranks).integers(2, 60, size=48).tolist()
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(12), 4)).tolist()
    config = learner_config(PADDED, "learner.tokens_per_microbatch=100")
    plan = split_microbatches(rows_of(lengths), config, num_ranks, groups)
    assert sorted(i for share in plan for batch in share for i in batch) == list(range(48))
    held = [{groups[i] for batch in share for i in batch} for share in plan]
    assert sum(map(len, held)) <= 12 + num_ranks - 1, "no more than the groups at the borders are on two ranks"
    loads = [sum(lengths[i] for batch in share for i in batch) for share in plan]
    assert max(loads) - min(loads) <= 2 * max(lengths)
    for share in plan:
        found = [lengths[i] for batch in share for i in batch]
        assert found == sorted(found), "neighbours in a micro-batch are alike"


def test_groups_with_images_of_their_own_are_shared_out_by_these(handles: list[MediaHandle]) -> None:
    rng = np.random.default_rng(0)
    rows, groups = [], []
    for n, handle in enumerate(handles):
        for length in rng.integers(9, 60, size=5):
            rows.append(TokenSequence(np.zeros(length, np.int32), 5, (handle,), (MediaSpan(1, 5),)))
            groups.append(n)
    config = learner_config(PADDED, "learner.tokens_per_microbatch=100", "learner.image_token_cost=3")
    assert split_microbatches(rows, config, 3, groups) == split_microbatches(rows, config, 3)


@pytest.fixture
def handles() -> list[MediaHandle]:
    return [image(n) for n in range(6)]


def test_one_row_longer_than_the_budget_goes_alone_and_idle_ranks_keep_step() -> None:
    config = learner_config("learner.tokens_per_microbatch=100")
    assert split_microbatches(rows_of([500]), config, 2) in ([[(0,)], [()]], [[()], [(0,)]])


MASKS = ([True, True, False, False, True], [True, False, False, True])
REFERENCE = ("algorithm.kl.coef=0.1", "resources.reference.num_workers=1")


def episodes(folder: Path, garbage: float) -> ScoredGroup:
    """Two episodes; log-probs of the policy and of the reference under False are `garbage`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scored = group(prompt(tokenizer, "a", [image(1)]), [[1, 2, 60, 61, 3], [4, 62, 63, 5]], [1.0, 0.0])
    masks = [np.array(mask) for mask in MASKS]
    logprobs = [np.where(mask, -5.0, garbage).astype(np.float32) for mask in masks]
    trajectories = tuple(
        dataclasses.replace(t, action_mask=mask) for t, mask in zip(scored.group.trajectories, masks, strict=True)
    )
    scored = dataclasses.replace(scored, group=dataclasses.replace(scored.group, trajectories=trajectories))
    references = [np.where(mask, -5.2, -garbage).astype(np.float32) for mask in masks]
    return dataclasses.replace(with_logprobs(scored, logprobs), reference_logprobs=references)


def updated(folder: Path, garbage: float, *words: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    learner = connected_learner(tiny_config(folder, *words))
    learner.begin_rl()
    metrics = learner.update([episodes(folder, garbage)], 1).metrics
    return copied(learner), dict(metrics)


@pytest.mark.parametrize(
    "words",
    [
        REFERENCE,
        ("algorithm=reinforce_pp", "algorithm.kl.coef=0.1", "resources.reference.num_workers=1"),
        (*REFERENCE, "algorithm.loss=gspo", "algorithm.old_logprobs=recomputed", "algorithm.correction=tis_sequence"),
        ("algorithm=ppo_gae", "resources.reference.num_workers=1", "algorithm.critic.learning_rate=0.001"),
    ],
)
def test_garbage_at_masked_tokens_leaves_the_update_as_it_is(folder: Path, words: tuple[str, ...]) -> None:
    weights, metrics = updated(folder, 0.0, *words)
    others, other_metrics = updated(folder, -7.5, *words)
    assert metrics["loss"] != 0 and metrics == pytest.approx(other_metrics, abs=1e-7)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
