"""TokenPolicy equals the model of transformers; masked tokens change nothing; the output layer works in chunks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import edited, group, image, prompt, random_groups, tiny_config
from one_learner import connected_learner, copied, largest_difference
from scored_rows import HOT, collated, learner_config, plain_logprobs, policy_at
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mobula.cluster.records.media import MediaSpan
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import PolicyConfig
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.checkpoint import load_policy_model
from mobula.learner.policies.head import PLAIN, Distribution, ScoringHead, Steps, token_logprobs
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


NUM_TOKENS, WIDTH, VOCABULARY = 23, 16, 61
ADAM = "learner.adam_eps=1.0e-4"  # at 1e-8 the rounding of a gradient near 0 moves a weight by the learning rate
ROUNDING = 5e-6  # of float32 over a float64 reference: which kernel a processor has moves the last bits


def linear(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)


def drawn(seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [N, H], targets [N], and a weight of each log-prob and entropy in a loss [N]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    return hidden, targets, *torch.randn(2, NUM_TOKENS, generator=generator)


def expected(layer: nn.Linear, hidden: Tensor, targets: Tensor, distribution: Distribution) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies in float64 from the definition: q = exp(z) / sum exp(z), H = -sum q log q."""
    bias = torch.zeros(VOCABULARY, dtype=torch.float64)
    bias[list(distribution.banned_ids)] = -100.0
    z = (hidden.double() @ layer.weight.double().T + bias) / distribution.temperature
    logs = z - z.exp().sum(dim=1, keepdim=True).log()
    return logs[torch.arange(len(targets)), targets], -(logs.exp() * logs).sum(dim=1)


@pytest.mark.parametrize("distribution", [PLAIN, HOT], ids=["plain", "hot"])
@pytest.mark.parametrize("chunk_tokens", [1, 5, NUM_TOKENS, 1000])
@pytest.mark.parametrize("entropy_has_gradient", [False, True])
def test_values_and_gradients_are_those_of_all_logits_at_once(distribution, chunk_tokens, entropy_has_gradient) -> None:
    layer, (hidden, targets, of_logprobs, of_entropy) = linear(), drawn()
    ours = hidden.clone().requires_grad_()
    head = ScoringHead(layer, chunk_tokens)
    logprobs, entropy, _ = head(ours, targets, distribution, entropy_has_gradient)
    assert entropy.requires_grad is entropy_has_gradient
    loss = (logprobs * of_logprobs).sum() + (entropy * of_entropy).sum()
    loss.backward()
    own_grad, layer.weight.grad = layer.weight.grad.clone(), None

    plain = hidden.clone().requires_grad_()
    found = expected(layer, plain, targets, distribution)
    torch.testing.assert_close(logprobs.double(), found[0], atol=ROUNDING, rtol=ROUNDING)
    torch.testing.assert_close(entropy.double(), found[1], atol=ROUNDING, rtol=ROUNDING)
    reference = (found[0] * of_logprobs).sum()
    if entropy_has_gradient:
        reference = reference + (found[1] * of_entropy).sum()
    reference.backward()
    torch.testing.assert_close(ours.grad, plain.grad, atol=ROUNDING, rtol=ROUNDING)
    torch.testing.assert_close(own_grad, layer.weight.grad, atol=ROUNDING, rtol=ROUNDING)
    assert own_grad.abs().max() > 0.1


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("entropy_has_gradient", [False, True])
def test_kept_sets_and_hot_first_tokens_are_those_of_the_definition(chunk_tokens, entropy_has_gradient) -> None:
    """log p = z_y / T_n - log of the sum over the kept set of exp(z / T_n), in float64; FIRE sets T of first tokens."""
    layer, (hidden, targets, of_logprobs, of_entropy) = linear(), drawn()
    rows = torch.arange(NUM_TOKENS)
    is_kept = torch.rand(NUM_TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(5)) < 0.2
    is_kept[rows, targets] = True
    is_kept[3] = True  # a step that was not cut: it has no set
    counts = torch.where(is_kept.all(dim=1), 0, is_kept.sum(dim=1))
    is_first = rows % 6 == 0
    kept = is_kept.nonzero()[is_kept.nonzero()[:, 0] != 3]
    steps = Steps(is_first, kept[:, 1], kept[:, 0], counts.cumsum(0).numpy())
    fire = Distribution(0.7, (), first_token_temperature=5.0)

    ours = hidden.clone().requires_grad_()
    logprobs, entropy, _ = ScoringHead(layer, chunk_tokens)(ours, targets, fire, entropy_has_gradient, steps)
    ((logprobs * of_logprobs).sum() + (entropy * of_entropy).sum()).backward()

    plain = hidden.double().requires_grad_()
    z = plain @ layer.weight.detach().double().T / torch.where(is_first, 5.0, 0.7)[:, None]
    weights = torch.where(is_kept, z.exp(), 0.0)
    q = weights / weights.sum(dim=1, keepdim=True)
    found = q[rows, targets].log()
    uncertainty = -torch.where(is_kept, q * q.clamp(min=1e-300).log(), 0.0).sum(dim=1)
    torch.testing.assert_close(logprobs.double(), found, atol=ROUNDING, rtol=ROUNDING)
    torch.testing.assert_close(entropy.double(), uncertainty, atol=ROUNDING, rtol=ROUNDING)
    reference = (found * of_logprobs).sum() + ((uncertainty * of_entropy).sum() if entropy_has_gradient else 0.0)
    reference.backward()
    torch.testing.assert_close(ours.grad.double(), plain.grad, atol=ROUNDING, rtol=ROUNDING)


def test_is_argmax_is_that_of_the_whole_vocabulary() -> None:
    layer, (hidden, targets, *_) = linear(), drawn()
    likeliest = (hidden @ layer.weight.T).argmax(dim=1)
    targets = torch.where(torch.arange(NUM_TOKENS) % 2 == 0, likeliest, (likeliest + 1) % VOCABULARY)
    is_argmax = ScoringHead(layer, 4)(hidden, targets, PLAIN, False)[2]
    assert is_argmax.tolist() == [n % 2 == 0 for n in range(NUM_TOKENS)]


def test_a_frozen_layer_passes_gradients_on_and_has_none() -> None:
    layer, (hidden, targets, *_) = linear(), drawn()
    layer.weight.requires_grad_(False)
    hidden.requires_grad_()
    ScoringHead(layer, 4)(hidden, targets, PLAIN, False)[0].sum().backward()
    assert layer.weight.grad is None and hidden.grad.abs().max() > 0


def test_without_tokens_the_gradient_is_zero_and_not_missing() -> None:
    layer, hidden = linear(), torch.zeros(0, WIDTH, requires_grad=True)
    logprobs, *_ = ScoringHead(layer, 4)(hidden, torch.zeros(0, dtype=torch.int64), PLAIN, False)
    logprobs.sum().backward()
    assert logprobs.shape == (0,) and layer.weight.grad.abs().max() == 0


def test_under_autocast_on_cpu_logits_are_rounded_and_the_weights_gradient_is_not() -> None:
    layer, (hidden, targets, of_logprobs, _) = linear(), drawn()
    grads = {}
    for chunk_tokens in (3, 1000):
        layer.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, *_ = ScoringHead(layer, chunk_tokens)(hidden, targets, PLAIN, False)
            logits = layer(hidden)
        assert logits.dtype is torch.bfloat16
        rounded = logits.float().log_softmax(dim=-1)[torch.arange(NUM_TOKENS), targets]
        torch.testing.assert_close(logprobs, rounded, atol=1e-6, rtol=0)
        (logprobs * of_logprobs).sum().backward()
        grads[chunk_tokens] = layer.weight.grad
    assert grads[3].dtype is torch.float32
    torch.testing.assert_close(grads[3], grads[1000], atol=2e-2, rtol=2e-2)  # products in bfloat16, sums in float32


def test_a_layer_with_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy\.model .*without a bias"):
        ScoringHead(nn.Linear(4, 4), 8)


class MostRows(TorchDispatchMode):
    """Keeps the largest number of rows of a tensor whose last axis is the vocabulary, whatever operation made it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.num_rows, self._vocabulary = 0, vocabulary

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[-1] == self._vocabulary:
                self.num_rows = max(self.num_rows, leaf.numel() // self._vocabulary)
        return result


@pytest.mark.parametrize("overrides", [(), ("algorithm.entropy.bonus=0.01",)], ids=["no bonus", "bonus"])
def test_no_update_makes_a_matrix_of_all_tokens_by_the_vocabulary(tmp_path: Path, overrides) -> None:
    folder = write_tiny_qwen2_5_vl(tmp_path / "tiny", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    groups = random_groups(tokenizer, 4, 4, longest=20)
    found = {}
    for chunk_tokens in (3, 100_000):
        words = (f"learner.logprob_chunk_tokens={chunk_tokens}", "learner.tokens_per_microbatch=100000", ADAM)
        learner = connected_learner(tiny_config(folder, *words, *overrides), (250,))
        with MostRows(len(tokenizer)) as seen:
            learner.update(groups, 1)
        found[chunk_tokens] = (seen.num_rows, copied(learner))
    num_tokens = sum(group.summary.num_tokens for group in groups)
    width = 128  # of the hidden states: the transposed weight of the layer is [128, V]
    assert found[100_000][0] >= num_tokens > width
    assert found[3][0] <= width
    for name, weight in found[3][1].items():
        torch.testing.assert_close(weight, found[100_000][1][name], atol=1e-6, rtol=0)
