"""On a GPU no micro-batch makes the host wait for the device, and logits of factors in bfloat16 are float32."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from gpus import ON_A_GPU
from learner_data import group, image, prompt
from tiny_checkpoints import write_text_policy
from torch import nn
from transformers import AutoTokenizer

from mobula.cluster.records.media import MediaReader
from mobula.configs.load import load_config
from mobula.learner.batch import LearnerItem, collate_items, fetch_items, tokens_by_age, totals
from mobula.learner.meter import Meter
from mobula.learner.objective import PolicyObjective, measure_gap
from mobula.learner.policies.head import PLAIN, Distribution, ScoringHead
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.quantised import quantise_layers, rounded
from mobula.learner.policies.tiny import write_tiny
from mobula.learner.policies.token import TokenPolicy

pytestmark = [*ON_A_GPU]

GPU = torch.device("cuda")
WORDS = ("experiment=digits", "algorithm.kl.coef=0", "resources.reference.num_workers=0", "learner.packing=true")
MOST_WAITS = 4  # with images: transformers counts placeholders, and its masked_scatter does so in the backward pass


@contextmanager
def sync_mode(mode: str) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def microbatch(policy: TokenPolicy, items: list[LearnerItem], meter: Meter) -> None:
    batch = collate_items(items, MediaReader(timeout_s=1, max_items=8), GPU)
    output = policy(batch.inputs, Distribution(0.7, (5, 9), first_token_temperature=2.0))
    measure_gap(output, batch, tokens_by_age(items), meter)
    objective = PolicyObjective(load_config(list(WORDS)).algorithm)
    objective(output, batch, totals(items), meter, 0.0).backward()


def policy_and_items(folder: Path, shown: list) -> tuple[TokenPolicy, list[LearnerItem]]:
    model = load_model(str(folder), torch.float32, "sdpa")
    policy = TokenPolicy(model, load_config(list(WORDS)).learner).train().to(GPU, torch.bfloat16)
    asked = prompt(AutoTokenizer.from_pretrained(folder), "0/0/a", shown)
    rng = np.random.default_rng(0)
    responses = [rng.integers(0, 250, size).tolist() for size in (5, 2, 9)]
    [items] = fetch_items([group(asked, responses, [1.0, 0.0, 1.0])], 1, 1.0)
    return policy, items


def test_a_microbatch_of_text_waits_for_nothing(tmp_path: Path) -> None:
    policy, items = policy_and_items(write_text_policy(tmp_path / "model", "qwen3"), [])
    microbatch(policy, items, Meter())  # what is made once, such as workspaces of libraries
    with sync_mode("error"):
        microbatch(policy, items, Meter())


def test_a_microbatch_of_images_waits_for_little(tmp_path: Path) -> None:
    folder = write_tiny("qwen2.5-vl", tmp_path / "model", seed=0)
    policy, items = policy_and_items(folder, [image(1), image(2, 6, 4)])
    microbatch(policy, items, Meter())
    with sync_mode("warn"), warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        microbatch(policy, items, Meter())
    assert len(waits) <= MOST_WAITS, [str(wait.message) for wait in waits]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_weight_of_a_gpu_is_that_of_a_cpu_and_moves(kind: str) -> None:
    """Engines load what a CPU has written: their numbers must be the learner's, also after its base was offloaded."""
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 256, bias=False))
    quantise_layers(model, ["0"], kind, torch.bfloat16)
    layer = model[0]
    layer.take(weight, GPU)
    expected = rounded(weight, kind, torch.bfloat16)
    assert torch.equal(layer.dequantised().cpu(), expected)
    inputs = torch.randn(5, 128, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    torch.testing.assert_close(layer(inputs), inputs @ expected.T.to(GPU))
    layer(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, expected.to(GPU).sum(0).expand(5, 128), atol=0.1, rtol=0.02)
    for device in ("cpu", "cuda"):
        model.to(device)
        assert layer.dequantised().device.type == device and torch.equal(layer.dequantised().cpu(), expected)


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
