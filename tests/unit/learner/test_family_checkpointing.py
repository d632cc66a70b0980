"""Recomputed blocks in every family: the gradients stay, and fewer bytes are kept for the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_prompts import family_prompts, learner_of
from kept_bytes import kept_bytes

from mobula.cluster.records.media import MediaReader
from mobula.learner.policies.batch import TokenBatch, TokenSequence, collate
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import disable_dropout, load_model, recompute_blocks
from mobula.learner.policies.tiny import TINY, write_tiny
from mobula.learner.policies.token import TokenPolicy

USUAL = ("qwen2.5-vl", "gemma3", "qwen3.5")  # windows; masks of images; linear attention
ANSWER = range(20, 36)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.exhaustive]) for name in TINY]
)
def test_recomputed_blocks_keep_less_and_give_the_same_gradients(name: str, tmp_path: Path) -> None:
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="its processor needs mobula[smolvlm]")
    folder = write_tiny(name, tmp_path / name, seed=1)
    prompts = [case.prompt for case in family_prompts(folder, tmp_path).cases.values()]
    rows = [TokenSequence.of_response(prompt, torch.tensor(ANSWER, dtype=torch.int32).numpy()) for prompt in prompts]
    batch = collate(rows, MediaReader(timeout_s=1, max_items=12), torch.device("cpu"))
    (kept, expected), (kept_less, found) = (backward(folder, batch, kind) for kind in ("none", "blocks"))
    assert kept_less < kept / 2
    assert expected.keys() == found.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, atol=1e-6, rtol=1e-6, msg=lambda m, n=parameter: n + m)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3


def backward(folder: Path, batch: TokenBatch, kind: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that a forward pass in training mode keeps, and the gradient of each parameter that it reaches."""
    model = load_model(str(folder), torch.float32, "sdpa").train()
    disable_dropout(model)
    recompute_blocks(model, kind)
    policy = TokenPolicy(model, learner_of(folder))
    loss: list[torch.Tensor] = []
    kept = kept_bytes(lambda: loss.append(policy(batch, PLAIN).logprobs.mean()) or loss, policy.parameters())
    loss[0].backward()
    return kept, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
