"""A rank of the training service that trains all weights equals torch's AdamW on transformers' model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_rows import ADAM, call_of, whole
from learner_data import tiny_config
from tiny_text_models import write_text_policy
from torch import Tensor
from transformers import AutoModelForCausalLM

from mobula.cluster.training_service.interfaces import AdapterSpec, LossCall, LossRow
from mobula.learner.adapters.full_weights import FullWeightsRank

ALL = AdapterSpec(rank=0, alpha=32.0, seed=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_policy(tmp_path_factory.mktemp("base") / "model", "llama")


def connected(base: Path) -> FullWeightsRank:
    rank = FullWeightsRank(tiny_config(base, "learner.tokens_per_microbatch=60"), 0, 1)
    rank.connect("")
    return rank


def logprobs_of(model: torch.nn.Module, row: LossRow) -> Tensor:
    logits = model(torch.from_numpy(row.prompt.expanded_ids.astype(np.int64))[None]).logits[0]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(row.inputs["target_tokens"])[:, None])[:, 0]


def trained(rank: FullWeightsRank, steps: range) -> list[float]:
    losses = []
    for n in steps:
        losses.append(whole(rank.compute([call_of("a", n)])[0]).metrics["loss:sum"])
        rank.step("a", ADAM)
    return losses


def test_steps_equal_adamw_of_torch_and_the_export_is_a_checkpoint(base: Path, tmp_path: Path) -> None:
    rank, model = connected(base), AutoModelForCausalLM.from_pretrained(base)
    rank.create("a", ALL)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )  # fmt: skip
    for n in range(3):
        call = call_of("a", n)
        result = whole(rank.compute([call])[0])
        for row, output in zip(call.rows, result.outputs, strict=True):
            logprobs = logprobs_of(model, row)
            np.testing.assert_allclose(output["logprobs"], logprobs.detach().numpy(), atol=1e-5, rtol=0)
            (-logprobs * torch.from_numpy(row.inputs["weights"])).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        assert rank.step("a", ADAM)["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    rank.export("a", tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    initial = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-5, rtol=0)
    assert max(float((exported[name] - initial[name]).abs().max()) for name in initial) > 1e-2


def test_saved_state_continues_and_a_new_model_starts_from_the_base(base: Path, tmp_path: Path) -> None:
    rank = connected(base)
    rank.create("a", ALL)
    trained(rank, range(2))
    rank.compute([call_of("a", 50)])  # a gradient that no step has applied
    rank.save("a", tmp_path / "state")
    expected = trained(rank, range(2, 4))

    rank.load("a", tmp_path / "state", with_optimizer=True)
    assert trained(rank, range(2, 4)) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="a is active"):
        rank.create("b", ALL)

    rank.drop("a")
    rank.create("a", ALL)
    other = connected(base)
    other.create("a", ALL)
    assert trained(rank, range(2)) == pytest.approx(trained(other, range(2)), rel=1e-5)


def test_a_call_that_is_refused_adds_no_gradient(base: Path) -> None:
    rank = connected(base)
    rank.create("a", ALL)
    [refused] = rank.compute([LossCall("a", [], "cross_entropy")])
    assert isinstance(refused, ValueError)
    with pytest.raises(ValueError, match="no gradient"):
        rank.step("a", ADAM)


def test_several_ranks_are_refused(base: Path) -> None:
    with pytest.raises(ValueError, match="trains on one rank, and there are 2"):
        FullWeightsRank(tiny_config(base), 0, 2)
