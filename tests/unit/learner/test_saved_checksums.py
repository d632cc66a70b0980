"""The checksum of a push is computed again from the checkpoint of its version, whatever a push sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_data import random_groups, tiny_config
from one_learner import connected_learner
from transformers import AutoTokenizer

from mobula.cluster.weight_sync.changes import VersionStep
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policy_weights import saved_checksum

EPOCH = 1
LORA = "policy.lora.rank=4"
PUSHES = {
    "weights": (),
    "bfloat16": ("resources.dtype=bfloat16",),
    "delta": ("weight_sync.payload=delta", "resources.dtype=bfloat16"),
    "merged": (LORA,),
    "adapters": (LORA, "weight_sync.payload=adapters"),
    "frozen": ("policy.freeze=[visual.]",),
    "average": ("learner.ema_decay=0.5",),
}


class Nowhere:
    """A transfer group without receivers."""

    def broadcast(self, buffer: torch.Tensor, what: str) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.mark.parametrize("name", PUSHES)
def test_a_checkpoint_has_the_checksum_of_its_push_alone(model: Path, tmp_path: Path, name: str) -> None:
    config = tiny_config(model, *PUSHES[name])
    learner = connected_learner(config)
    learner.begin_rl()
    learner.weights._groups[EPOCH] = Nowhere()  # type: ignore[assignment]
    groups = random_groups(AutoTokenizer.from_pretrained(model), 3, 4)
    pushed, saved = [], []
    for version in range(3):
        if version > 0:
            learner.update(groups, version)
        step = VersionStep(version, version - 1 if version else None, is_last=True)
        sent = learner.send_weights(1 << 16, EPOCH, step if name == "delta" else None)
        folder = tmp_path / f"{version}"
        learner.save(folder)
        learner.finish_save()
        pushed.append(f"{sent.checksum:032x}")
        saved.append(saved_checksum(config, folder))
    assert saved == pushed
    assert len(set(saved)) == 3
