"""`learner.master_dtype=bfloat16`: small updates are kept in the mean; pushes, checkpoints and exports work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from learner_data import prompt, random_groups, tiny_config
from safetensors.torch import load_file
from taught import at_hand
from transformers import AutoTokenizer

from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.learner.learner import Learner
from mobula.learner.optim import RoundedAdamW, rounded
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.supervised import SupervisedExample

BFLOAT16 = ("resources.dtype=bfloat16", "learner.master_dtype=bfloat16")
LORA = ("policy.lora.rank=4", "policy.lora.alpha=8.0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(params=["single", "fsdp2"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def connected(model: Path, backend: str, *overrides: str) -> Learner:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    learner = Learner(tiny_config(model, f"learner={backend}", *overrides), 0, 1, ())
    learner.connect(learner.rendezvous_address() if backend == "fsdp2" else "")
    return learner


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner._named_weights()}


def test_rounding_keeps_values_of_bfloat16_and_the_mean_of_all_others() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.tensor([0.0, 1.0, -3.5, 2.0**-130, float("inf"), -float("inf")])
    assert torch.equal(rounded(exact, generator).float(), exact)
    for value in (1.001, -0.02003, 7e-9):
        drawn = rounded(torch.full((100_000,), value), generator).float()
        low, high = drawn.min().item(), drawn.max().item()
        assert low < value < high and set(drawn.unique().tolist()) == {low, high}
        assert drawn.mean().item() == pytest.approx(value, abs=0.01 * (high - low))


def test_updates_that_rounding_to_the_nearest_loses_are_kept_in_the_mean() -> None:
    weight = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    nearest = weight.detach().clone()
    optimizer = RoundedAdamW([{"params": [weight]}], lr=1e-4, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(50):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        nearest -= 1e-4
    assert torch.equal(nearest, torch.ones_like(nearest))
    assert weight.float().mean().item() == pytest.approx(1 - 50e-4, abs=2e-4)


def test_weights_in_float32_take_the_steps_of_adamw() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(50, 7))
    torchs = torch.nn.Parameter(ours.detach().clone())
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizers = (
        RoundedAdamW([{"params": [ours], "weight_decay": 0.1}], **settings),
        torch.optim.AdamW([torchs], weight_decay=0.1, **settings),
    )
    for _ in range(5):
        ours.grad = torch.randn(50, 7)
        torchs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-7)


def test_weights_gradients_and_moments_take_half_the_memory(model: Path, backend: str) -> None:
    learner = connected(model, backend, *BFLOAT16)
    gradients = []
    step = learner._optimizer.step

    def seen() -> None:
        gradients.extend(parameter.grad.dtype for parameter in learner._policy.parameters())
        step()

    learner._optimizer.step = seen
    learner.update(random_groups(AutoTokenizer.from_pretrained(model), 3, 4), 1)
    moments = [t for s in learner._optimizer.state.values() for t in s.values() if t.ndim > 0]
    held = [*learner._backend.trained().values(), *moments]
    assert {tensor.dtype for tensor in held} == set(gradients) == {torch.bfloat16}


def test_it_learns_as_float32_does(model: Path, backend: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = [torch.arange(n, n + 3).numpy().astype("int32") for n in range(4)]
    rows = [SupervisedExample(prompt(tokenizer, str(n)), ids, ids >= 0) for n, ids in enumerate(answers)]
    losses = {}
    for name, overrides in {"float32": ("resources.dtype=bfloat16",), "bfloat16": BFLOAT16}.items():
        learner = connected(model, backend, "warm_start.learning_rate=0.003", *overrides)
        losses[name] = [learner.supervised_step(at_hand(rows))["loss"] for _ in range(30)]
    assert losses["bfloat16"][0] == pytest.approx(losses["float32"][0], rel=0.01)
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], abs=0.1)
    assert losses["bfloat16"][-1] < 0.3 * losses["bfloat16"][0]


@pytest.mark.parametrize("adapters", [(), LORA])
def test_it_resumes_bit_for_bit_and_exports_what_it_pushes(
    model: Path, backend: str, adapters: tuple[str, ...], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [random_groups(tokenizer, 3, 4, seed) for seed in range(3)]
    first = connected(model, backend, *BFLOAT16, *adapters)
    before = weights(first)
    first.update(steps[0], 1)
    first.save(tmp_path / "state")
    first.update(steps[1], 2)
    first.finish_save()
    first.export(tmp_path / "export")
    after = weights(first)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor.to(exported[name].dtype)) for name, tensor in after.items())
    second = connected(model, backend, *BFLOAT16, *adapters)
    assert second.load(tmp_path / "state") == 1
    second.update(steps[1], 2)
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(second).items())


def test_adapters_are_trained_in_float32(model: Path) -> None:
    learner = connected(model, "single", *BFLOAT16, *LORA)
    assert {tensor.dtype for tensor in learner._backend.trained().values()} == {torch.float32}
    frozen = {p.dtype for p in learner._policy.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}


@pytest.mark.parametrize(
    "refused", ["learner=deepspeed", "learner.optimizer=muon", "learner.ema_decay=0.9", "resources.dtype=float32"]
)
def test_what_needs_weights_in_float32_is_refused(refused: str) -> None:
    words = overridden(["experiment=digits", "learner=fsdp2", *BFLOAT16], [refused])
    with pytest.raises(ConfigError, match="learner.master_dtype=bfloat16 is trained with"):
        load_config(words)
