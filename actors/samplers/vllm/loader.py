"""Runs inside vLLM's worker process: loads the tensors of a checkpoint that the learner loads, under push names.

vLLM's loader reads every safetensors file of a folder without an index, prefers the vendor's format to Hugging Face's,
and fails on tensors that its model lacks. transformers ignores such files and tensors.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from mobula.actors.samplers.vllm.arguments import LOAD_FORMAT
from mobula.learner.policies.checkpoint.stored import loaded_tensors, pushed_tensors


@register_model_loader(LOAD_FORMAT)
class CheckpointLoader(DefaultModelLoader):
    """Loads the same tensors as the learner."""

    def download_model(self, model_config: Any) -> None:
        _folder(model_config.model)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Generator[tuple[str, torch.Tensor]]:
        # With an output embedding in the files vLLM makes a tied one a layer apart, and ties equal ones again.
        is_apart = model_config.word_embeddings_untied_by_checkpoint
        yield from (loaded_tensors if is_apart else pushed_tensors)(_folder(model_config.model))


def _folder(model: str) -> Path:
    """The local folder of `policy.model`."""
    return Path(model) if Path(model).is_dir() else Path(snapshot_download(model))
