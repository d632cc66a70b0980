"""Adapters on one frozen base: calls, batches of several adapters, and PEFT; a rank that trains all weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_rows import (
    ADAM,
    OTHER,
    SPEC,
    call_of,
    computed,
    factors_of,
    logprobs_of,
    rank_with,
    rows_of,
    text_row,
    weighted,
    whole,
)
from fakes import LocalHandle, by_value
from learner_data import image, prompt, tiny_config
from one_learner import connected_learner, largest_difference
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_checkpoints import write_text_policy
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from mobula.cluster.errors import CheckpointError, WorkerDiedError
from mobula.cluster.training_service.interfaces import AdapterSpec, LossCall, LossResult, LossRow
from mobula.learner.adapters.group import AdapterGroup
from mobula.learner.adapters.ranks import AdapterRank, FullWeightsRank

IDS = np.array([5, 9, 11, 7, 30, 2])

POLICY = {"logprobs": np.full(5, -5.0, np.float32), "advantages": np.linspace(-1, 1, 5).astype(np.float32)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_policy(tmp_path_factory.mktemp("base") / "model", "llama")


@pytest.fixture
def rank(base: Path) -> AdapterRank:
    return rank_with(base, a=SPEC, b=OTHER)


def gradients_of(rank: AdapterRank, adapter: str) -> torch.Tensor:
    return rank._adapters[adapter].gradient()


def clipped(p: float, q: float, a: float, low: float, high: float) -> float:
    ratio = math.exp(p - q)
    return -min(ratio * a, min(max(ratio, low), high) * a)


@pytest.mark.parametrize(
    ("loss", "options", "formula"),
    [
        ("importance_sampling", {}, lambda p, q, a: -math.exp(p - q) * a),
        ("ppo", {}, lambda p, q, a: clipped(p, q, a, 0.8, 1.2)),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, lambda p, q, a: clipped(p, q, a, 0.9, 1.05)),
        ("cispo", {"clip_high_threshold": 1.01}, lambda p, q, a: -min(math.exp(p - q), 1.01) * a * p),
        ("dro", {"beta": 0.5}, lambda p, q, a: -(p * a - 0.25 * (p - q) ** 2)),
    ],
)
def test_loss_is_the_sum_of_its_formula(rank: AdapterRank, loss: str, options: dict, formula) -> None:
    result = computed(rank, LossCall("a", [text_row(IDS, **POLICY)], loss, options))
    columns = (result.outputs[0]["logprobs"], POLICY["logprobs"], POLICY["advantages"])
    expected = sum(formula(*token) for token in zip(*(column.tolist() for column in columns), strict=True))
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def policy_with(**inputs: np.ndarray) -> LossRow:
    return text_row(IDS, **{**POLICY, **inputs})


def weighted_with(**inputs: np.ndarray) -> LossRow:
    row = weighted(IDS)
    return replace(row, inputs={**row.inputs, **inputs})


GOOD = weighted(IDS)
INFINITE = GOOD.inputs["weights"] + np.float32(np.inf)
BAD_ROWS: dict[str, tuple[str, list[LossRow], str]] = {
    "no such loss": ("mse", [GOOD], "no loss 'mse'.*cross_entropy"),
    "no rows": ("cross_entropy", [], "no rows"),
    "no beta": ("dro", [policy_with()], "dro needs the option beta"),
    "no weights": ("cross_entropy", [text_row(IDS)], "target_tokens, weights"),
    "few targets": ("cross_entropy", [weighted_with(target_tokens=IDS[:2])], r"5 tokens and targets of shape \(2,\)"),
    "few weights": ("cross_entropy", [weighted_with(weights=np.ones(2, np.float32))], r"weights of shape \(2,\)"),
    "unknown target": ("cross_entropy", [weighted_with(target_tokens=IDS[1:] + 10**6)], "row 0.*ids from 0 to"),
    "unknown token": ("cross_entropy", [GOOD, weighted(IDS - 6)], "row 1 .*tokens from -"),
    "several targets of ppo": (
        "ppo",
        [policy_with(**{name: np.stack([column] * 2, 1) for name, column in POLICY.items()})],
        "logprobs of shape",
    ),
    "too long": ("cross_entropy", [weighted(np.ones(40_000, int))], "39999 tokens"),
    "infinite weight": ("cross_entropy", [weighted_with(weights=INFINITE)], "loss of the call is inf"),
    "not a number": (
        "ppo",
        [policy_with(), policy_with(advantages=np.full(5, np.nan, np.float32))],
        "loss of the call is nan",
    ),
}
BAD_CALLS = {name: (LossCall("a", rows, loss), message) for name, (loss, rows, message) in BAD_ROWS.items()} | {
    "no such adapter": (LossCall("c", [GOOD], "cross_entropy"), "no adapter 'c'"),
    "unknown option": (LossCall("a", [GOOD], "cross_entropy", {"beta": 1.0}), "no option 'beta'"),
    "option of no number": (LossCall("a", [policy_with()], "dro", {"beta": math.nan}), "beta is nan"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_failed_call_fails_alone(base: Path, rank: AdapterRank, name: str) -> None:
    bad, message = BAD_CALLS[name]
    good, same_adapter = call_of("b", 1), call_of("a", 2)
    failed, *others = rank.compute([bad, good, same_adapter])
    with pytest.raises(ValueError, match=message):
        raise failed if isinstance(failed, Exception) else AssertionError(failed)
    alone = rank_with(base, a=SPEC, b=OTHER)
    for found, expected in zip(others, alone.compute([good, same_adapter]), strict=True):
        assert whole(found).metrics == pytest.approx(whole(expected).metrics, rel=1e-6)
    for adapter in ("a", "b"):
        torch.testing.assert_close(gradients_of(rank, adapter), gradients_of(alone, adapter), atol=1e-5, rtol=1e-5)


def test_calls_of_one_adapter_add_up(base: Path, rank: AdapterRank) -> None:
    rows = rows_of(4, num=4)
    rank.compute([LossCall("a", rows[:1], "cross_entropy"), LossCall("a", rows[1:3], "cross_entropy")])
    rank.compute([LossCall("a", rows[3:], "cross_entropy")])
    once = rank_with(base, a=SPEC)
    once.compute([LossCall("a", rows, "cross_entropy")])
    torch.testing.assert_close(gradients_of(rank, "a"), gradients_of(once, "a"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_several_targets_at_a_position(base: Path, packing: str) -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 250, size=(5, 3))
    weights = rng.normal(size=(5, 3)).astype(np.float32)
    row = text_row(IDS)
    many = LossRow(row.prompt, {"target_tokens": targets, "weights": weights})
    columns = [{"target_tokens": targets[:, k], "weights": weights[:, k].copy()} for k in range(3)]
    one_by_one = [LossRow(row.prompt, inputs) for inputs in columns]
    found = {}
    for name, rows in (("many", [many, weighted(IDS)]), ("one by one", [*one_by_one, weighted(IDS)])):
        rank = rank_with(base, f"learner.packing={packing}", a=SPEC)
        found[name] = computed(rank, LossCall("a", rows, "cross_entropy")), gradients_of(rank, "a")
    logits = AutoModelForCausalLM.from_pretrained(base)(torch.from_numpy(IDS[None, :-1])).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(targets)).detach().numpy()
    np.testing.assert_allclose(found["many"][0].outputs[0]["logprobs"], expected, atol=1e-5, rtol=0)
    assert found["many"][0].metrics == pytest.approx(found["one by one"][0].metrics, rel=1e-5)
    torch.testing.assert_close(found["many"][1], found["one by one"][1], atol=1e-5, rtol=1e-5)


def test_rows_with_images(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    shown = {"t": [], "i": [image(1), image(2, 2, 4)], "j": [image(3)]}
    asked = [prompt(tokenizer, name, images) for name, images in shown.items()]
    rows = []
    for one in asked:
        targets = np.append(one.expanded_ids[1:], 7).astype(np.int64)
        rows.append(LossRow(one, {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}))
    rank = rank_with(folder, a=SPEC, b=OTHER)
    both = rank.compute([LossCall("a", rows, "cross_entropy"), LossCall("b", rows[1:], "cross_entropy")])
    learner = connected_learner(tiny_config(folder))
    for one, output in zip(asked, whole(both[0]).outputs, strict=True):
        np.testing.assert_allclose(output["logprobs"][:-1], learner.sequence_logprobs(one), atol=1e-5, rtol=0)
    alone = rank_with(folder, b=OTHER)
    alone.compute([LossCall("b", rows[1:], "cross_entropy")])
    torch.testing.assert_close(gradients_of(rank, "b"), gradients_of(alone, "b"), atol=1e-5, rtol=1e-4)


def test_a_gradient_that_is_not_finite_skips_the_step(rank: AdapterRank) -> None:
    rank.compute([call_of("a", 0)])
    before = factors_of(rank, "a")
    rank._adapters["a"].parameters[0].grad.fill_(math.inf)
    assert rank.step("a", ADAM)["skipped"] == 1.0
    assert largest_difference(before, factors_of(rank, "a")) == 0
    rank.compute([call_of("a", 0)])
    metrics = rank.step("a", ADAM)
    assert (metrics["skipped"], metrics["optimizer_steps"]) == (0.0, 1.0)


def test_a_loaded_state_goes_on_bit_equal(base: Path, rank: AdapterRank, tmp_path: Path) -> None:
    rank.compute([call_of("a", 0)])
    rank.step("a", ADAM)
    rank.compute([call_of("a", 1)])
    rank.save("a", tmp_path)
    resumed = rank_with(base, a=replace(SPEC, seed=99))
    resumed.load("a", tmp_path, with_optimizer=True)
    for one in (rank, resumed):
        one.step("a", ADAM)
        one.compute([call_of("a", 2)])
        one.step("a", ADAM)
    assert largest_difference(factors_of(rank, "a"), factors_of(resumed, "a")) == 0


def test_a_state_loaded_without_the_optimizer_has_no_gradient(base: Path, rank: AdapterRank, tmp_path: Path) -> None:
    rank.compute([call_of("a", 0)])
    rank.step("a", ADAM)
    rank.compute([call_of("a", 1)])
    rank.save("a", tmp_path)
    rank.load("a", tmp_path, with_optimizer=False)
    with pytest.raises(ValueError, match="no gradient"):
        rank.step("a", ADAM)
    rank.compute([call_of("a", 1)])
    assert rank.step("a", ADAM)["optimizer_steps"] == 1.0


def test_what_does_not_fit_is_refused(base: Path, rank: AdapterRank, tmp_path: Path) -> None:
    rank.save("a", tmp_path)
    with pytest.raises(ValueError, match="rank=4 and not 2.*create the adapter as the saved one"):
        rank.load("b", tmp_path, with_optimizer=True)
    with pytest.raises(CheckpointError, match="no saved adapter"):
        rank.load("a", tmp_path / "elsewhere", with_optimizer=True)
    with pytest.raises(ValueError, match="there is an adapter 'a'"):
        rank.create("a", SPEC)
    for message, changed in {
        "train_unembed=False": {"trains_unembedding": True},
        "fits no linear layer": {"trains_attention": False, "trains_mlp": False},
        "rank of 1 or more": {"rank": 0},
    }.items():
        with pytest.raises(ValueError, match=message):
            rank.create("c", replace(SPEC, **changed))
    rank.drop("a")
    with pytest.raises(ValueError, match=r"no adapter 'a'.*\['b'\]"):
        rank.step("a", ADAM)


@pytest.mark.parametrize(
    "words",
    [("learner=deepspeed",), ("policy.lora.rank=4",), ("policy.dropout=true", "supervision.on_logprob_gap=warn")],
)
def test_configurations_without_a_shared_base_are_refused(base: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="with a training service: set"):
        AdapterRank(tiny_config(base, *words), 0, 1)


async def test_the_group_answers_as_its_ranks(base: Path, tmp_path: Path) -> None:
    config = tiny_config(base)
    group = AdapterGroup(lambda: [LocalHandle(AdapterRank(config, 0, 1))], config.timeouts, by_value)
    await group.start()
    await group.create("a", SPEC)
    failed, result = await group.compute([LossCall("a", [], "cross_entropy"), call_of("a", 0)])
    assert isinstance(failed, ValueError) and not isinstance(result, Exception)
    alone = rank_with(base, a=SPEC)
    expected = computed(alone, call_of("a", 0))
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-6)
    assert len(result.outputs) == len(expected.outputs)
    await group.save("a", tmp_path / "state")
    assert await group.step("a", ADAM) == pytest.approx(alone.step("a", ADAM), rel=1e-4)
    await group.load("a", tmp_path / "state", with_optimizer=True)
    await group.export("a", tmp_path / "export")
    assert (tmp_path / "export" / "adapter_config.json").is_file()
    await group.drop("a")
    with pytest.raises(ValueError, match="no adapter 'a'"):
        await group.step("a", ADAM)


async def test_lost_ranks_are_started_again_before_the_next_call(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(base)
    spawned: list[AdapterRank] = []

    def spawn() -> list[LocalHandle]:
        spawned.append(AdapterRank(config, 0, 1))
        return [LocalHandle(spawned[-1])]

    def lose(*args: object) -> None:
        raise WorkerDiedError("learner/0 died")

    monkeypatch.setattr("mobula.learner.learner_group.kill", lambda worker: None)
    group = AdapterGroup(spawn, config.timeouts, by_value)
    await group.start()
    await group.create("a", SPEC)
    spawned[0].compute = lose  # type: ignore[method-assign]
    with pytest.raises(WorkerDiedError):
        await group.compute([call_of("a", 0)])
    [result] = await group.compute([call_of("a", 0)])
    assert len(spawned) == 2
    assert "no adapter 'a'" in str(result)
    await group.create("a", SPEC)
    [result] = await group.compute([call_of("a", 0)])
    assert not isinstance(result, Exception)
    with pytest.raises(ValueError, match="there is an adapter"):
        await group.create("a", SPEC)
    assert len(spawned) == 2, "a refused call restarts no rank"


STEPS = 5


@pytest.mark.parametrize("packing", ["true", "false"])
def test_two_adapters_in_one_batch_equal_each_alone(base: Path, packing: str) -> None:
    layout, specs = f"learner.packing={packing}", {"a": SPEC, "b": OTHER}
    both = rank_with(base, layout, **specs)
    alone = {name: rank_with(base, layout, **{name: spec}) for name, spec in specs.items()}
    before = factors_of(both, "a")
    for n in range(STEPS):
        calls = [call_of("a", n), call_of("b", 100 + n)]
        for call, part in zip(calls, both.compute(calls), strict=True):
            expected = computed(alone[call.adapter], call)
            for mine, single in zip(whole(part).outputs, expected.outputs, strict=True):
                np.testing.assert_allclose(mine["logprobs"], single["logprobs"], atol=1e-5, rtol=0)
        for name, single_rank in alone.items():
            assert both.step(name, ADAM) == pytest.approx(single_rank.step(name, ADAM), rel=1e-4)
    for name, single_rank in alone.items():
        assert largest_difference(factors_of(both, name), factors_of(single_rank, name)) < 1e-5
    assert largest_difference(factors_of(both, "a"), before) > 1e-3, "the adapters have moved"


def test_training_lowers_the_loss_and_a_forward_pass_adds_no_gradient(base: Path) -> None:
    rank, losses = rank_with(base, a=SPEC), []
    for _ in range(STEPS):
        losses.append(computed(rank, call_of("a", 0)).metrics["loss:sum"])
        rank.step("a", ADAM)
    losses.append(computed(rank, call_of("a", 0, has_backward=False)).metrics["loss:sum"])
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[-2]
    with pytest.raises(ValueError, match="no gradient"):
        rank.step("a", ADAM)


@torch.no_grad()
def test_loss_is_the_weighted_sum_of_log_probs_of_the_base_model_at_first(base: Path) -> None:
    call, total = call_of("a", 0), 0.0
    with torch.enable_grad():
        result = computed(rank_with(base, a=SPEC), call)
    model = AutoModelForCausalLM.from_pretrained(base)
    for row, output in zip(call.rows, result.outputs, strict=True):
        expected = logprobs_of(model, row).numpy()
        np.testing.assert_allclose(output["logprobs"], expected, atol=1e-5, rtol=0)
        total -= float((expected * row.inputs["weights"]).sum())
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_rows_share_prefixes_within_a_call_alone(base: Path) -> None:
    """Two adapters with the same prompts; siblings of one call compute their prompt once."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 250, size=12)
    rows = [weighted(np.append(prefix, rng.integers(0, 250, size=n))) for n in (3, 5, 5)]
    found = {}
    for shares in ("true", "false"):
        rank = rank_with(base, f"learner.share_prompts={shares}", tokens=200, a=SPEC, b=OTHER)
        assert rank._shares_prefixes is (shares == "true")
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


@pytest.fixture(scope="module")
def peft_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_policy(tmp_path_factory.mktemp("base") / "model", "qwen2")


def peft_twin(peft_base: Path, rank: AdapterRank, spec: AdapterSpec) -> PeftModel:
    """PEFT's model with the factors of the adapter `a`."""
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", *["gate_proj", "up_proj", "down_proj"] * spec.trains_mlp]
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, lora_dropout=0.0, target_modules=kinds)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(peft_base), config)
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


def adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """torch's, with the settings of `ADAM`."""
    betas = (ADAM.beta1, ADAM.beta2)
    return torch.optim.AdamW(
        parameters, lr=ADAM.learning_rate, betas=betas, eps=ADAM.eps, weight_decay=ADAM.weight_decay
    )


def backward_by_hand(model: nn.Module, call: LossCall, result: LossResult) -> None:
    """The gradient of a call's cross-entropy by transformers' own forward, whose log-probs `result` has."""
    for row, output in zip(call.rows, result.outputs, strict=True):
        logprobs = logprobs_of(model, row)
        np.testing.assert_allclose(output["logprobs"], logprobs.detach().numpy(), atol=1e-5, rtol=0)
        (-logprobs * torch.from_numpy(row.inputs["weights"])).sum().backward()


@pytest.mark.parametrize("spec", [SPEC, OTHER], ids=["all layers", "attention"])
def test_steps_equal_peft_with_adamw_of_torch(peft_base: Path, spec: AdapterSpec) -> None:
    rank = rank_with(peft_base, a=spec, b=SPEC)
    model = peft_twin(peft_base, rank, spec)
    optimizer = adamw(twin_factors(model).values())
    for n in range(4):
        rate, call = ADAM.learning_rate / (n + 1), call_of("a", n)
        backward_by_hand(model, call, whole(rank.compute([call_of("b", 50 + n), call])[1]))
        norm = torch.nn.utils.clip_grad_norm_(twin_factors(model).values(), ADAM.grad_clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        metrics = rank.step("a", replace(ADAM, learning_rate=rate))
        expected = {"grad_norm": norm.item(), "skipped": 0.0, "optimizer_steps": n + 1.0}
        assert metrics == pytest.approx(expected, rel=1e-4)
    own = factors_of(rank, "a")
    for name, factor in twin_factors(model).items():
        torch.testing.assert_close(own[name], factor.detach(), atol=1e-5, rtol=0)


def test_a_custom_loss_has_the_gradient_of_its_weights(peft_base: Path) -> None:
    """Log-probs first, then cross-entropy with weights of minus the gradient of the loss by the log-probs."""
    rank = rank_with(peft_base, a=SPEC)
    model = peft_twin(peft_base, rank, SPEC)
    rows = rows_of(0)
    forward = computed(rank, LossCall("a", rows, "cross_entropy", has_backward=False))
    leaves = [torch.from_numpy(output["logprobs"].copy()).requires_grad_() for output in forward.outputs]
    torch.cat(leaves).var().backward()
    pairs = zip(rows, leaves, strict=True)
    weighed = [LossRow(row.prompt, {**row.inputs, "weights": -leaf.grad.numpy()}) for row, leaf in pairs]
    computed(rank, LossCall("a", weighed, "cross_entropy"))
    torch.cat([logprobs_of(model, row) for row in rows]).var().backward()
    own = rank._adapters["a"].factors
    for name, factor in twin_factors(model).items():
        module, _, number = name.rpartition(".")
        torch.testing.assert_close(own[module][int(number)].grad, factor.grad, atol=1e-6, rtol=1e-4)


def test_peft_loads_an_export(peft_base: Path, tmp_path: Path) -> None:
    rank = rank_with(peft_base, a=SPEC)
    rank.compute([call_of("a", 0)])
    rank.step("a", ADAM)
    rank.export("a", tmp_path / "export")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(peft_base), tmp_path / "export")
    call = call_of("a", 1, has_backward=False)
    for row, output in zip(call.rows, computed(rank, call).outputs, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(output["logprobs"], logprobs_of(model, row).numpy(), atol=1e-5, rtol=0)


ALL_WEIGHTS = AdapterSpec(rank=0, alpha=32.0, seed=0)


def full_rank(base: Path, *words: str) -> FullWeightsRank:
    """The only rank that trains all weights, with the model `a`."""
    full = FullWeightsRank(tiny_config(base, "learner.tokens_per_microbatch=60", *words), 0, 1)
    full.connect("")
    full.create("a", ALL_WEIGHTS)
    return full


@pytest.fixture
def full(base: Path) -> FullWeightsRank:
    return full_rank(base)


def trained(full: FullWeightsRank, steps: range) -> list[float]:
    losses = []
    for n in steps:
        losses.append(computed(full, call_of("a", n)).metrics["loss:sum"])
        full.step("a", ADAM)
    return losses


def test_steps_equal_adamw_of_torch_and_the_export_is_a_checkpoint(base: Path, tmp_path: Path) -> None:
    full, model = full_rank(base), AutoModelForCausalLM.from_pretrained(base)
    optimizer = adamw(model.parameters())
    for n in range(3):
        call = call_of("a", n)
        backward_by_hand(model, call, computed(full, call))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        assert full.step("a", ADAM)["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    full.export("a", tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    initial = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-5, rtol=0)
    assert max(float((exported[name] - initial[name]).abs().max()) for name in initial) > 1e-2


def test_saved_state_continues_and_a_new_model_starts_from_the_base(
    base: Path, full: FullWeightsRank, tmp_path: Path
) -> None:
    trained(full, range(2))
    full.compute([call_of("a", 50)])  # a gradient that no step has applied
    full.save("a", tmp_path / "state")
    expected = trained(full, range(2, 4))

    full.load("a", tmp_path / "state", with_optimizer=True)
    assert trained(full, range(2, 4)) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="a is active"):
        full.create("b", ALL_WEIGHTS)

    full.drop("a")
    full.create("a", ALL_WEIGHTS)
    other = full_rank(base)
    assert trained(full, range(2)) == pytest.approx(trained(other, range(2)), rel=1e-5)


def test_a_call_that_is_refused_adds_no_gradient(full: FullWeightsRank) -> None:
    [refused] = full.compute([LossCall("a", [], "cross_entropy")])
    assert isinstance(refused, ValueError)
    with pytest.raises(ValueError, match="no gradient"):
        full.step("a", ADAM)


def test_the_optimizer_of_bytes_follows_the_same_steps(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    full, plain = full_rank(base, "learner.optimizer=adamw_8bit"), full_rank(base)
    losses = trained(full, range(4))
    assert losses == pytest.approx(trained(plain, range(4)), rel=1e-2)
    full.save("a", tmp_path / "state")
    expected = trained(full, range(4, 6))
    full.load("a", tmp_path / "state", with_optimizer=True)
    assert trained(full, range(4, 6)) == pytest.approx(expected, rel=1e-5)


def test_a_state_before_the_first_step_keeps_its_gradient(full: FullWeightsRank, tmp_path: Path) -> None:
    full.compute([call_of("a", 0)])
    full.save("a", tmp_path / "state")
    norm = full.step("a", ADAM)["grad_norm"]
    expected = trained(full, range(1, 3))
    full.load("a", tmp_path / "state", with_optimizer=True)
    assert full.step("a", ADAM) == {"grad_norm": pytest.approx(norm), "skipped": 0.0, "optimizer_steps": 1.0}
    assert trained(full, range(1, 3)) == pytest.approx(expected, rel=1e-5)


def test_a_state_without_its_optimizer_starts_with_a_fresh_one(base: Path, tmp_path: Path) -> None:
    full, other = full_rank(base), full_rank(base)
    trained(full, range(2))
    full.compute([call_of("a", 50)])
    full.save("a", tmp_path / "state")
    other.load("a", tmp_path / "state", with_optimizer=False)
    with pytest.raises(ValueError, match="no gradient"):
        other.step("a", ADAM)
    other.compute([call_of("a", 0)])
    assert other.step("a", ADAM)["optimizer_steps"] == 1.0
    full.load("a", tmp_path / "state", with_optimizer=False)
    full.compute([call_of("a", 0)])
    assert full.step("a", ADAM)["optimizer_steps"] == 1.0
    assert trained(full, range(2)) == pytest.approx(trained(other, range(2)), rel=1e-5)


def test_states_that_do_not_fit_are_refused(base: Path, full: FullWeightsRank, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete learner state"):
        full.load("a", tmp_path / "nothing", with_optimizer=True)
    adapters = rank_with(base, b=SPEC)
    adapters.save("b", tmp_path / "adapter")
    with pytest.raises(ValueError, match="holds an adapter"):
        full.load("a", tmp_path / "adapter", with_optimizer=True)
    full.save("a", tmp_path / "state")
    with pytest.raises(CheckpointError, match="holds no saved adapter"):
        adapters.load("b", tmp_path / "state", with_optimizer=True)
    larger = full_rank(write_text_policy(tmp_path / "model", "qwen3"))
    with pytest.raises(ValueError, match="the saved weights lack"):
        larger.load("a", tmp_path / "state", with_optimizer=True)
    trained(full, range(1))  # a refusal changes nothing


def test_a_folder_that_cannot_be_written_is_an_error_of_the_request(full: FullWeightsRank, tmp_path: Path) -> None:
    full.compute([call_of("a", 0)])
    (tmp_path / "file").write_text("")
    for call in (full.save, full.export):
        with pytest.raises(OSError, match="file"):
            call("a", tmp_path / "file" / "state")
    assert full.step("a", ADAM)["optimizer_steps"] == 1.0, "the gradient is kept"


def test_an_optimizer_with_other_parameters_is_refused(base: Path) -> None:
    with pytest.raises(ValueError, match="learner.optimizer=muon does not go with"):
        FullWeightsRank(tiny_config(base, "training_service.weights=full", "learner.optimizer=muon"), 0, 1)
