"""What the learner keeps where: recomputed blocks give the same gradient; offload that would do nothing is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_data import random_groups, tiny_config
from transformers import AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)


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
