"""Memory of a learner: recomputed blocks, micro-batches and weights in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import prompt, random_groups, tiny_config
from one_learner import (
    UNCLIPPED,
    Tensors,
    at_hand,
    connected_learner,
    copied,
    gradient_of,
    largest,
    largest_difference,
    saved,
)
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

import mobula.learner.backends.native as fsdp2
from mobula.cluster.records.actions import TokenActions
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.learner.backends.deepspeed import DeepSpeedBackend
from mobula.learner.backends.sharded import saved_tensors
from mobula.learner.examples import Example
from mobula.learner.learner import Learner
from mobula.learner.optim import RoundedAdamW, rounded

GPU = ("experiment=digits", "resources=two_gpu")

PARTS = {
    "all": (),
    "without vision": ("policy.freeze=[visual.]",),
    "adapters": ("policy.lora.rank=4", "policy.lora.alpha=64.0"),
}


def step(folder: Path, tokenizer, kind: str, *overrides: str) -> tuple[Tensors, list[str]]:
    """Gradients of one update, and the blocks that were computed on the way, in order."""
    words = (f"learner.activation_checkpointing={kind}", UNCLIPPED, *overrides)
    learner, computed = connected_learner(tiny_config(folder, *words)), list[str]()
    for name, module in learner.policy.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(lambda *_, name=name: computed.append(name))
    gradient, _ = gradient_of(learner, random_groups(tokenizer, 3, 4))
    return gradient, computed


@pytest.mark.parametrize("trained", PARTS)
def test_blocks_that_are_computed_again_give_the_same_gradient(folder: Path, tokenizer, trained: str) -> None:
    kept, once = step(folder, tokenizer, "none", *PARTS[trained])
    recomputed, twice = step(folder, tokenizer, "blocks", *PARTS[trained])
    assert kept.keys() == recomputed.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-7, rtol=1e-5)
    assert largest(kept) > 1e-4
    for name in {name for name in once if "language_model" in name}:
        assert twice.count(name) == 2 * once.count(name)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("learner.activation_checkpointing=blocks_offloaded",), "set learner.activation_checkpointing=blocks"),
        (("learner.offload=parameters",), "resources.device=cpu, where it is already: set learner.offload=none"),
        ((*GPU[1:], "learner=single", "learner.offload=optimizer"), "use learner=fsdp2 or learner=deepspeed"),
        ((*GPU[1:], "learner=fsdp2", "learner.offload=optimizer"), "set learner.offload=parameters or none"),
        ((*GPU[1:], "learner=deepspeed", "learner.offload=parameters"), "set learner.zero_stage=3"),
        (
            (*GPU[1:], "learner=fsdp2", "learner.offload=parameters", "resources.colocated=true"),
            "resources.colocated=true moves all of it",
        ),
    ],
)
def test_offload_that_would_be_nothing_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["experiment=digits", *overrides])


@pytest.mark.parametrize(
    ("overrides", "offloaded"),
    [
        ((), set()),
        (("learner.offload=optimizer",), {"offload_optimizer"}),
        (("learner.offload=parameters", "learner.zero_stage=3"), {"offload_optimizer", "offload_param"}),
    ],
)
def test_deepspeed_is_asked_to_offload_what_the_key_names(overrides: tuple[str, ...], offloaded: set[str]) -> None:
    config = load_config([*GPU, "learner=deepspeed", *overrides]).learner
    found = DeepSpeedBackend(torch.device("cuda"), torch.bfloat16, config)._settings()["zero_optimization"]
    assert {key for key in found if key.startswith("offload")} == offloaded
    assert all(found[key]["device"] == "cpu" for key in offloaded)


PRODUCTS = ("mm", "addmm", "bmm")

SOFTMAX = "_log_softmax"


@pytest.fixture(params=["single", "fsdp2"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    left()


def left() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def on(backend: str, folder: Path, *overrides: str) -> Learner:
    """The only rank of a backend, whose process group takes the place of an earlier one."""
    left()
    learner = Learner(tiny_config(folder, f"learner={backend}", *overrides), 0, 1, ())
    learner.connect(learner.rendezvous_address() if backend == "fsdp2" else "")
    return learner


class Seen(TorchDispatchMode):
    """The dtypes of the first factors of products, and of what a softmax over the vocabulary gives."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.dtypes.setdefault("product", set()).add(args[-1].dtype)
        if name == SOFTMAX:
            self.dtypes.setdefault("softmax", set()).add(result.dtype)
        return result


def state_dtypes(learner: Learner, folder: Path) -> set[torch.dtype]:
    """Of the trained weights and of the moments in a checkpoint."""
    kept = ("model.", "optimizer.state.")
    tensors = [read() for name, read in saved_tensors(saved(learner, folder)).items() if name.startswith(kept)]
    assert any(tensor.ndim > 0 for tensor in tensors)
    return {tensor.dtype for tensor in tensors if tensor.ndim > 0}


def test_a_step_in_bfloat16_keeps_float32_where_sums_and_small_changes_are(
    folder: Path, tokenizer, backend: str, tmp_path: Path
) -> None:
    learner = on(backend, folder, "resources.dtype=bfloat16")
    with Seen() as seen:
        report = learner.update(random_groups(tokenizer, num_groups=2, num_siblings=6), version=1)
    assert report.metrics["grad_norm"] > 0
    assert torch.bfloat16 in seen.dtypes["product"]
    assert seen.dtypes["softmax"] == {torch.float32}
    assert state_dtypes(learner, tmp_path) == {torch.float32}


def test_gradients_are_reduced_in_float32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 casts what it gathers, and reduces gradients in a type of its own. DeepSpeed reduces in that of its
    parameters, which stay float32: its own bf16 mode and a type for communication are not set."""
    policies, shard = [], fsdp2.fully_shard

    def recorded(module, **how):
        policies.append(how["mp_policy"])
        return shard(module, **how)

    monkeypatch.setattr(fsdp2, "fully_shard", recorded)
    on("fsdp2", folder, "resources.dtype=bfloat16").close()
    assert {(p.param_dtype, p.reduce_dtype) for p in policies} == {(torch.bfloat16, torch.float32)}
    config = tiny_config(folder, "learner=deepspeed", "resources.dtype=bfloat16").learner
    settings = DeepSpeedBackend(torch.device("cpu"), torch.bfloat16, config)._settings()
    assert not settings.keys() & {"bf16", "fp16", "communication_data_type", "data_types"}


BFLOAT16 = ("resources.dtype=bfloat16", "learner.master_dtype=bfloat16")

LORA = ("policy.lora.rank=4", "policy.lora.alpha=8.0")


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


def test_weights_gradients_and_moments_take_half_the_memory(
    folder: Path, tokenizer, backend: str, tmp_path: Path
) -> None:
    learner = on(backend, folder, *BFLOAT16)
    gradient, _ = gradient_of(learner, random_groups(tokenizer, 3, 4))
    assert {tensor.dtype for tensor in gradient.values()} == state_dtypes(learner, tmp_path) == {torch.bfloat16}


def test_it_learns_as_float32_does(folder: Path, tokenizer, backend: str) -> None:
    answers = [np.arange(n, n + 3, dtype=np.int32) for n in range(4)]
    rows = [Example.of_answer(prompt(tokenizer, str(n)), TokenActions(ids), ids >= 0) for n, ids in enumerate(answers)]
    losses = {}
    for name, overrides in {"float32": ("resources.dtype=bfloat16",), "bfloat16": BFLOAT16}.items():
        learner = on(backend, folder, "warm_start.learning_rate=0.003", *overrides)
        losses[name] = [learner.supervised_step(at_hand(rows))["loss"] for _ in range(30)]
    assert losses["bfloat16"][0] == pytest.approx(losses["float32"][0], rel=0.01)
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], abs=0.1)
    assert losses["bfloat16"][-1] < 0.3 * losses["bfloat16"][0]


@pytest.mark.parametrize("adapters", [(), LORA])
def test_it_resumes_bit_for_bit_and_exports_what_it_pushes(
    folder: Path, tokenizer, backend: str, adapters: tuple[str, ...], tmp_path: Path
) -> None:
    steps = [random_groups(tokenizer, 3, 4, seed) for seed in range(2)]
    first = on(backend, folder, *BFLOAT16, *adapters)
    before = copied(first)
    first.update(steps[0], 1)
    first.save(tmp_path / "state")
    first.update(steps[1], 2)
    first.finish_save()
    first.export(tmp_path / "export")
    after = copied(first)
    assert largest_difference(before, after) > 0
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor.to(exported[name].dtype)) for name, tensor in after.items())
    second = on(backend, folder, *BFLOAT16, *adapters)
    assert second.load(tmp_path / "state") == 1
    second.update(steps[1], 2)
    assert largest_difference(copied(second), after) == 0


def test_adapters_are_trained_in_float32(folder: Path) -> None:
    learner = on("single", folder, *BFLOAT16, *LORA)
    dtypes = {(p.requires_grad, p.dtype) for p in learner.policy.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


@pytest.mark.parametrize(
    "refused", ["learner=deepspeed", "learner.optimizer=muon", "learner.ema_decay=0.9", "resources.dtype=float32"]
)
def test_what_needs_weights_in_float32_is_refused(refused: str) -> None:
    words = overridden(["experiment=digits", "learner=fsdp2", *BFLOAT16], [refused])
    with pytest.raises(ConfigError, match="learner.master_dtype=bfloat16 is trained with"):
        load_config(words)
