"""A rank of the training service that trains all weights equals torch's AdamW on transformers' model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_rows import ADAM, SPEC, call_of, computed, logprobs_of, rank_with
from learner_data import tiny_config
from tiny_checkpoints import write_text_policy
from transformers import AutoModelForCausalLM

from mobula.cluster.errors import CheckpointError
from mobula.cluster.training_service.interfaces import AdapterSpec, LossCall
from mobula.learner.adapters.ranks import FullWeightsRank

ALL = AdapterSpec(rank=0, alpha=32.0, seed=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_policy(tmp_path_factory.mktemp("base") / "model", "llama")


def connected(base: Path, *words: str) -> FullWeightsRank:
    """The only rank, with the model `a`."""
    rank = FullWeightsRank(tiny_config(base, "learner.tokens_per_microbatch=60", *words), 0, 1)
    rank.connect("")
    rank.create("a", ALL)
    return rank


@pytest.fixture
def rank(base: Path) -> FullWeightsRank:
    return connected(base)


def trained(rank: FullWeightsRank, steps: range) -> list[float]:
    losses = []
    for n in steps:
        losses.append(computed(rank, call_of("a", n)).metrics["loss:sum"])
        rank.step("a", ADAM)
    return losses


def test_steps_equal_adamw_of_torch_and_the_export_is_a_checkpoint(base: Path, tmp_path: Path) -> None:
    rank, model = connected(base), AutoModelForCausalLM.from_pretrained(base)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )  # fmt: skip
    for n in range(3):
        call = call_of("a", n)
        result = computed(rank, call)
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


def test_saved_state_continues_and_a_new_model_starts_from_the_base(
    base: Path, rank: FullWeightsRank, tmp_path: Path
) -> None:
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
    assert trained(rank, range(2)) == pytest.approx(trained(other, range(2)), rel=1e-5)


def test_a_call_that_is_refused_adds_no_gradient(rank: FullWeightsRank) -> None:
    [refused] = rank.compute([LossCall("a", [], "cross_entropy")])
    assert isinstance(refused, ValueError)
    with pytest.raises(ValueError, match="no gradient"):
        rank.step("a", ADAM)


def test_the_optimizer_of_bytes_follows_the_same_steps(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    rank, plain = connected(base, "learner.optimizer=adamw_8bit"), connected(base)
    losses = trained(rank, range(4))
    assert losses == pytest.approx(trained(plain, range(4)), rel=1e-2)
    rank.save("a", tmp_path / "state")
    expected = trained(rank, range(4, 6))
    rank.load("a", tmp_path / "state", with_optimizer=True)
    assert trained(rank, range(4, 6)) == pytest.approx(expected, rel=1e-5)


def test_a_state_before_the_first_step_keeps_its_gradient(rank: FullWeightsRank, tmp_path: Path) -> None:
    rank.compute([call_of("a", 0)])
    rank.save("a", tmp_path / "state")
    norm = rank.step("a", ADAM)["grad_norm"]
    expected = trained(rank, range(1, 3))
    rank.load("a", tmp_path / "state", with_optimizer=True)
    assert rank.step("a", ADAM) == {"grad_norm": pytest.approx(norm), "skipped": 0.0, "optimizer_steps": 1.0}
    assert trained(rank, range(1, 3)) == pytest.approx(expected, rel=1e-5)


def test_a_state_without_its_optimizer_starts_with_a_fresh_one(base: Path, tmp_path: Path) -> None:
    rank, other = connected(base), connected(base)
    trained(rank, range(2))
    rank.compute([call_of("a", 50)])
    rank.save("a", tmp_path / "state")
    other.load("a", tmp_path / "state", with_optimizer=False)
    with pytest.raises(ValueError, match="no gradient"):
        other.step("a", ADAM)
    other.compute([call_of("a", 0)])
    assert other.step("a", ADAM)["optimizer_steps"] == 1.0
    rank.load("a", tmp_path / "state", with_optimizer=False)
    rank.compute([call_of("a", 0)])
    assert rank.step("a", ADAM)["optimizer_steps"] == 1.0
    assert trained(rank, range(2)) == pytest.approx(trained(other, range(2)), rel=1e-5)


def test_states_that_do_not_fit_are_refused(base: Path, rank: FullWeightsRank, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete learner state"):
        rank.load("a", tmp_path / "nothing", with_optimizer=True)
    adapters = rank_with(base, b=SPEC)
    adapters.save("b", tmp_path / "adapter")
    with pytest.raises(ValueError, match="holds an adapter"):
        rank.load("a", tmp_path / "adapter", with_optimizer=True)
    rank.save("a", tmp_path / "state")
    with pytest.raises(CheckpointError, match="holds no saved adapter"):
        adapters.load("b", tmp_path / "state", with_optimizer=True)
    larger = connected(write_text_policy(tmp_path / "model", "qwen3"))
    with pytest.raises(ValueError, match="the saved weights lack"):
        larger.load("a", tmp_path / "state", with_optimizer=True)
    trained(rank, range(1))  # a refusal changes nothing


def test_a_folder_that_cannot_be_written_is_an_error_of_the_request(rank: FullWeightsRank, tmp_path: Path) -> None:
    rank.compute([call_of("a", 0)])
    (tmp_path / "file").write_text("")
    for call in (rank.save, rank.export):
        with pytest.raises(OSError, match="file"):
            call("a", tmp_path / "file" / "state")
    assert rank.step("a", ADAM)["optimizer_steps"] == 1.0, "the gradient is kept"


def test_an_optimizer_with_other_parameters_is_refused(base: Path) -> None:
    with pytest.raises(ValueError, match="learner.optimizer=muon does not go with"):
        FullWeightsRank(tiny_config(base, "training_service.weights=full", "learner.optimizer=muon"), 0, 1)
