"""Adapters on one base equal PEFT with torch's AdamW, and PEFT loads what is exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_rows import ADAM, OTHER, SPEC, call_of, connected, factors_of, rows_of, whole
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_checkpoints import write_text_policy
from torch import Tensor
from transformers import AutoModelForCausalLM

from mobula.cluster.training_service.interfaces import AdapterSpec, LossCall, LossRow
from mobula.learner.adapters.rank import AdapterRank

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_policy(tmp_path_factory.mktemp("base") / "model", "qwen2")


def peft_twin(base: Path, rank: AdapterRank, spec: AdapterSpec) -> PeftModel:
    """PEFT's model with the factors of the adapter `a`."""
    kinds = ATTENTION + (MLP if spec.trains_mlp else [])
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, lora_dropout=0.0, target_modules=kinds)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    own = factors_of(rank, "a")
    with torch.no_grad():
        for name, parameter in twin_factors(model).items():
            parameter.copy_(own.pop(name))
    assert own == {}, "PEFT has the same factors"
    return model


def twin_factors(model: PeftModel) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            module, _, factor = name.removeprefix("base_model.model.").partition(".lora_")
            found[f"{module}.{'AB'.index(factor[0])}"] = parameter
    return found


def logprobs_of(model: torch.nn.Module, row: LossRow) -> Tensor:
    logits = model(torch.from_numpy(row.prompt.expanded_ids.astype(np.int64))[None]).logits[0]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(row.inputs["target_tokens"])[:, None])[:, 0]


@pytest.mark.parametrize("spec", [SPEC, OTHER], ids=["all layers", "attention"])
def test_steps_equal_peft_with_adamw_of_torch(base: Path, spec: AdapterSpec) -> None:
    rank = connected(base)
    rank.create("a", spec)
    rank.create("b", SPEC)
    model = peft_twin(base, rank, spec)
    optimizer = torch.optim.AdamW(
        twin_factors(model).values(), lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )  # fmt: skip
    for n in range(4):
        rate = ADAM.learning_rate / (n + 1)
        call = call_of("a", n)
        result = whole(rank.compute([call_of("b", 50 + n), call])[1])
        for row, output in zip(call.rows, result.outputs, strict=True):
            logprobs = logprobs_of(model, row)
            np.testing.assert_allclose(output["logprobs"], logprobs.detach().numpy(), atol=1e-5, rtol=0)
            (-logprobs * torch.from_numpy(row.inputs["weights"])).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(twin_factors(model).values(), ADAM.grad_clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        metrics = rank.step("a", replace(ADAM, learning_rate=rate))
        assert metrics == pytest.approx(
            {"grad_norm": norm.item(), "skipped": 0.0, "optimizer_steps": n + 1.0}, rel=1e-4
        )
    own = factors_of(rank, "a")
    for name, factor in twin_factors(model).items():
        torch.testing.assert_close(own[name], factor.detach(), atol=1e-5, rtol=0)


def test_a_custom_loss_has_the_gradient_of_its_weights(base: Path) -> None:
    """Log-probs first, then cross-entropy with weights of minus the gradient of the loss by the log-probs."""
    rank = connected(base)
    rank.create("a", SPEC)
    model = peft_twin(base, rank, SPEC)
    rows = rows_of(0)
    forward = whole(rank.compute([LossCall("a", rows, "cross_entropy", has_backward=False)])[0])
    leaves = [torch.from_numpy(output["logprobs"].copy()).requires_grad_() for output in forward.outputs]
    torch.cat(leaves).var().backward()
    weighed = [
        LossRow(row.prompt, {**row.inputs, "weights": -leaf.grad.numpy()})
        for row, leaf in zip(rows, leaves, strict=True)
        if leaf.grad is not None
    ]
    whole(rank.compute([LossCall("a", weighed, "cross_entropy")])[0])
    torch.cat([logprobs_of(model, row) for row in rows]).var().backward()
    own = rank._adapters["a"].factors
    for name, factor in twin_factors(model).items():
        module, _, number = name.rpartition(".")
        torch.testing.assert_close(own[module][int(number)].grad, factor.grad, atol=1e-6, rtol=1e-4)


def test_peft_loads_an_export(base: Path, tmp_path: Path) -> None:
    rank = connected(base)
    rank.create("a", SPEC)
    rank.compute([call_of("a", 0)])
    rank.step("a", ADAM)
    rank.export("a", tmp_path / "export")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "export")
    call = call_of("a", 1, has_backward=False)
    for row, output in zip(call.rows, whole(rank.compute([call])[0]).outputs, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(output["logprobs"], logprobs_of(model, row).numpy(), atol=1e-5, rtol=0)
