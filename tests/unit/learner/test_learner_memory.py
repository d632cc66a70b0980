"""What the learner keeps where, and in which types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from learner_data import random_groups, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

import mobula.learner.backends.fsdp2 as fsdp2
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.learner.backends.deepspeed import DeepSpeedBackend
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

GPU = ("experiment=digits", "resources=gpu_2")
PARTS = {
    "all": (),
    "without vision": ("policy.freeze=[visual.]",),
    "adapters": ("policy.lora.rank=4", "policy.lora.alpha=64.0"),
}


def step(folder: Path, kind: str, *overrides: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Gradients of one update, and the blocks that were computed on the way, in order."""
    words = (f"learner.activation_checkpointing={kind}", "learner.max_grad_norm=1000000", *overrides)
    learner = Learner(tiny_config(folder, *words), 0, 1, ())
    learner.connect("")
    learner._optimizer.zero_grad = lambda: None  # keep what this one step saw
    computed: list[str] = []
    for name, module in learner._policy.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(lambda *_, name=name: computed.append(name))
    learner.update(random_groups(AutoTokenizer.from_pretrained(folder), 3, 4), 1)
    return {name: p.grad for name, p in learner._policy.named_parameters() if p.requires_grad}, computed


@pytest.mark.parametrize("trained", PARTS)
def test_blocks_that_are_computed_again_give_the_same_gradient(folder: Path, trained: str) -> None:
    kept, once = step(folder, "none", *PARTS[trained])
    recomputed, twice = step(folder, "blocks", *PARTS[trained])
    assert kept.keys() == recomputed.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-7, rtol=1e-5)
    assert max(gradient.abs().max() for gradient in kept.values()) > 1e-4
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_qwen2_5_vl(folder, seed=0)
    return folder


@pytest.fixture(params=["single", "fsdp2"])
def trained(request: pytest.FixtureRequest, model: Path) -> Iterator[Learner]:
    learner = Learner(tiny_config(model, f"learner={request.param}", "resources.dtype=bfloat16"), 0, 1, ())
    learner.connect(learner.rendezvous_address() if request.param == "fsdp2" else "")
    yield learner
    learner.close()


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


def test_a_step_in_bfloat16_keeps_float32_where_sums_and_small_changes_are(trained: Learner, model: Path) -> None:
    groups = random_groups(AutoTokenizer.from_pretrained(model), num_groups=2, num_siblings=6)
    with Seen() as seen:
        report = trained.update(groups, version=1)
    assert report.metrics["grad_norm"] > 0
    assert torch.bfloat16 in seen.dtypes["product"]
    assert seen.dtypes["softmax"] == {torch.float32}
    assert {tensor.dtype for tensor in trained._backend.trained().values()} == {torch.float32}
    state = [leaf for leaf in tree_leaves(list(trained._optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
    assert state and {tensor.dtype for tensor in state} == {torch.float32}


def test_gradients_are_reduced_in_float32(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 casts what it gathers, and reduces gradients in a type of its own. DeepSpeed reduces in that of its
    parameters, which stay float32: its own bf16 mode and a type for communication are not set."""
    policies, shard = [], fsdp2.fully_shard

    def recorded(module, **how):
        policies.append(how["mp_policy"])
        return shard(module, **how)

    monkeypatch.setattr(fsdp2, "fully_shard", recorded)
    learner = Learner(tiny_config(model, "learner=fsdp2", "resources.dtype=bfloat16"), 0, 1, ())
    learner.connect(learner.rendezvous_address())
    learner.close()
    assert {(p.param_dtype, p.reduce_dtype) for p in policies} == {(torch.bfloat16, torch.float32)}
    config = tiny_config(model, "learner=deepspeed", "resources.dtype=bfloat16").learner
    settings = DeepSpeedBackend(torch.device("cpu"), torch.bfloat16, config)._settings()
    assert not settings.keys() & {"bf16", "fp16", "communication_data_type", "data_types"}
