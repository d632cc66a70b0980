"""Adapters of several users on one frozen base: each trains as if it were alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_rows import ADAM, OTHER, SPEC, call_of, connected, factors_of, largest_difference, weighted, whole
from tiny_checkpoints import write_text_policy

from mobula.cluster.training_service.interfaces import LossCall

STEPS = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_policy(tmp_path_factory.mktemp("base") / "model", "llama")


@pytest.mark.parametrize("packing", [True, False])
def test_two_adapters_in_one_batch_equal_each_alone(base: Path, packing: bool) -> None:
    layout = f"learner.packing={str(packing).lower()}"
    both = connected(base, layout)
    both.create("a", SPEC)
    both.create("b", OTHER)
    alone = {}
    for name, spec in (("a", SPEC), ("b", OTHER)):
        alone[name] = connected(base, layout)
        alone[name].create(name, spec)
    for n in range(STEPS):
        calls = [call_of("a", n), call_of("b", 100 + n)]
        for call, part in zip(calls, both.compute(calls), strict=True):
            [expected] = alone[call.adapter].compute([call])
            for mine, single in zip(whole(part).outputs, whole(expected).outputs, strict=True):
                np.testing.assert_allclose(mine["logprobs"], single["logprobs"], atol=1e-5, rtol=0)
        for name, single_rank in alone.items():
            assert both.step(name, ADAM) == pytest.approx(single_rank.step(name, ADAM), rel=1e-4)
    for name, single_rank in alone.items():
        assert largest_difference(factors_of(both, name), factors_of(single_rank, name)) < 1e-5
    assert largest_difference(factors_of(both, "a"), _fresh(base, "a")) > 1e-3, "the adapters have moved"


def test_training_lowers_the_loss_and_a_forward_pass_adds_no_gradient(base: Path) -> None:
    rank = connected(base)
    rank.create("a", SPEC)
    losses = []
    for _ in range(STEPS):
        losses.append(whole(rank.compute([call_of("a", 0)])[0]).metrics["loss:sum"])
        rank.step("a", ADAM)
    assert losses == sorted(losses, reverse=True)
    last = whole(rank.compute([call_of("a", 0, has_backward=False)])[0])
    assert last.metrics["loss:sum"] < losses[-1]
    with pytest.raises(ValueError, match="no gradient"):
        rank.step("a", ADAM)


def test_loss_is_the_weighted_sum_of_log_probs_of_the_base_model_at_first(base: Path) -> None:
    from transformers import AutoModelForCausalLM

    rank = connected(base)
    rank.create("a", SPEC)
    call: LossCall = call_of("a", 0)
    result = whole(rank.compute([call])[0])
    model = AutoModelForCausalLM.from_pretrained(base)
    total = 0.0
    for row, output in zip(call.rows, result.outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(row.prompt.expanded_ids.astype(np.int64))[None]).logits[0]
        targets = torch.from_numpy(row.inputs["target_tokens"])
        expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()
        np.testing.assert_allclose(output["logprobs"], expected, atol=1e-5, rtol=0)
        total -= float((expected * row.inputs["weights"]).sum())
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def _fresh(base: Path, name: str) -> dict[str, torch.Tensor]:
    rank = connected(base)
    rank.create(name, SPEC)
    return factors_of(rank, name)


def test_rows_share_prefixes_within_a_call_alone(base: Path) -> None:
    """Two adapters with the same prompts; siblings of one call compute their prompt once."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 250, size=12)
    rows = [weighted(np.append(prefix, rng.integers(0, 250, size=n))) for n in (3, 5, 5)]
    found = {}
    for shares in ("true", "false"):
        rank = connected(base, f"learner.share_prompts={shares}", tokens=200)
        assert rank._shares_prefixes is (shares == "true")
        rank.create("a", SPEC)
        rank.create("b", OTHER)
        for _ in range(2):
            parts = rank.compute([LossCall(name, rows, "cross_entropy") for name in ("a", "b")])
            for name in ("a", "b"):
                rank.step(name, ADAM)
        found[shares] = [output["logprobs"] for part in parts for output in whole(part).outputs], rank
    for shared, single in zip(found["true"][0], found["false"][0], strict=True):
        np.testing.assert_allclose(shared, single, atol=1e-5, rtol=0)
    assert np.abs(found["true"][0][0] - found["true"][0][3]).max() > 1e-4, "the adapters differ"
    for name in ("a", "b"):
        assert largest_difference(factors_of(found["true"][1], name), factors_of(found["false"][1], name)) < 1e-5
