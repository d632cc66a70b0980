"""On a GPU logits of factors in bfloat16 are float32, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mobula.learner.policies.head import PLAIN, ScoringHead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"),
]
NUM_TOKENS, WIDTH, VOCABULARY = 23, 16, 64


@pytest.mark.parametrize("is_cast", [True, False], ids=["autocast", "bfloat16 weights"])
def test_logits_of_bfloat16_factors_are_not_rounded(is_cast: bool) -> None:
    """Compared with float64 of the rounded factors. Logits are over 30, where bfloat16 has steps of 0.25."""
    torch.manual_seed(0)
    hidden, targets = torch.randn(NUM_TOKENS, WIDTH).bfloat16(), torch.randint(VOCABULARY, (NUM_TOKENS,))
    weight, of_logprobs = 10 * torch.randn(VOCABULARY, WIDTH), torch.randn(NUM_TOKENS)
    exact = weight.bfloat16().double().requires_grad_()
    logits = hidden.double() @ exact.T
    assert logits.abs().max() > 30
    expected = logits.log_softmax(dim=-1)
    (expected[torch.arange(NUM_TOKENS), targets] * of_logprobs).sum().backward()

    layer = nn.Linear(WIDTH, VOCABULARY, bias=False)
    layer.weight = nn.Parameter(weight if is_cast else weight.bfloat16())
    head = ScoringHead(layer.cuda(), 5)
    with torch.autocast("cuda", torch.bfloat16, enabled=is_cast):
        logprobs, entropy, _ = head(hidden.cuda(), targets.cuda(), PLAIN, False)
    (logprobs * of_logprobs.cuda()).sum().backward()
    assert logprobs.dtype is entropy.dtype is torch.float32
    found = expected[torch.arange(NUM_TOKENS), targets]
    torch.testing.assert_close(logprobs.double().cpu(), found, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy.double().cpu(), -(expected.exp() * expected).sum(dim=-1), atol=1e-4, rtol=1e-5)
    gradient = layer.weight.grad.double().cpu()
    assert (gradient - exact.grad).norm() <= 0.01 * exact.grad.norm()
