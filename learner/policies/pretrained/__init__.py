"""Checkpoints with released weights that ship inside Python packages, usable without a hub account."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PretrainedConfig

from mobula.learner.policies.pretrained.smollm2 import smollm2_config, write_smollm2
from mobula.learner.policies.pretrained.smolvlm import smolvlm_config, write_smolvlm

__all__ = ["PRETRAINED", "Pretrained"]


class Writer(Protocol):
    """Writes a checkpoint into a folder and returns the folder; `seed` seeds parts with random weights."""

    def __call__(self, folder: Path, *, seed: int = 0) -> Path: ...


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint that can be written without a network."""

    config: Callable[[], PretrainedConfig]
    """Returns the config.json of the checkpoint; writes nothing."""
    write: Writer


PRETRAINED: dict[str, Pretrained] = {
    "smollm2-135m": Pretrained(smollm2_config, write_smollm2),
    "smolvlm-smollm2": Pretrained(smolvlm_config, write_smolvlm),
}
"""`policy.tiny`, or the name of `mobula init-model` -> checkpoint."""
