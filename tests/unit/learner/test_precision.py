"""Types of a run in bfloat16: weights, gradients, optimizer state and log-probs are float32, large products are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from learner_data import random_groups, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer

import mobula.learner.backends.fsdp2 as fsdp2
from mobula.learner.backends.deepspeed import DeepSpeedBackend
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

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
