"""The output layer in chunks equals logits of all tokens at once, in values and gradients, and never holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_data import random_groups, tiny_config
from one_learner import connected_learner, copied
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer

from mobula.learner.policies.head import PLAIN, Distribution, ScoringHead, Steps
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

NUM_TOKENS, WIDTH, VOCABULARY = 23, 16, 61
HOT = Distribution(0.7, (5, 9))
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
