"""Runs inside vLLM's worker process: loads the tensors of a checkpoint that the learner has, by their names in a push.

vLLM's own loader reads every safetensors file of a folder without an index, prefers the maker's format to that of
Hugging Face, and fails on a tensor that its model does not have. transformers leaves such files and tensors out.
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
    """Loads what the learner loads."""

    def download_model(self, model_config: Any) -> None:
        _folder(model_config.model)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Generator[tuple[str, torch.Tensor]]:
        # With an output embedding in the files vLLM makes a tied one a layer apart, and ties equal ones again.
        is_apart = model_config.word_embeddings_untied_by_checkpoint
        yield from (loaded_tensors if is_apart else pushed_tensors)(_folder(model_config.model))


def _folder(model: str) -> Path:
    """The local folder of `policy.model`."""
    return Path(model) if Path(model).is_dir() else Path(snapshot_download(model))
