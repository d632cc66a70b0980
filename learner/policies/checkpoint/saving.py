"""Policies to checkpoints in the Hugging Face layout, with the dtypes and the other files of the one they came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from mobula.learner.policies.checkpoint.stored import GENERATION_FILE, SavedDtypes, checkpoint_folder
from mobula.learner.policies.families import own_family
from mobula.learner.policies.loading import as_stored, saved_names

CONFIG_FILE = "config.json"
TEMPLATES_FOLDER = "additional_chat_templates"
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)


def save_policy(
    model: PreTrainedModel, source: str, folder: Path, full_state: Mapping[str, Tensor], dtype: str = ""
) -> None:
    """Write a checkpoint that transformers and vLLM load like the one at `source`, with its other files.

    Each tensor has the dtype that it has there, and config.json the one that most values have.

    Args:
        source: `policy.model`.
        full_state: state-dict name -> whole tensor on the CPU.
        dtype: that of all tensors, if they are not to keep theirs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    original = checkpoint_folder(source)
    dtypes, tied = SavedDtypes.of_model(original, dtype), set(model.all_tied_weights_keys)
    family = own_family(model.config)
    prefix = "" if family is None else family.checkpoint_prefix
    state = {}
    for name, tensor in full_state.items():
        if name not in tied:  # loading finds those again in the tensors that they are tied to
            [saved] = saved_names(model, name, tensor)
            state[name] = dtypes.cast(prefix + saved, as_stored(model, name, tensor)).contiguous()
    if prefix:
        save_torch_state_dict({f"{prefix}{name}": tensor for name, tensor in state.items()}, folder)
        shutil.copy2(original / CONFIG_FILE, folder / CONFIG_FILE)
    else:
        with _valid_generation_config(model):
            model.save_pretrained(folder, state_dict=state)
    _copy_other_files(original, folder)
    _write_dtype(original, folder, dtypes, keeps_parts=not dtype)


@contextmanager
def _valid_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """transformers refuses to save some files that it loads; the original is copied anyway.

    A model with a head for scores has none.
    """
    if not model.can_generate():
        yield
        return
    before = model.generation_config
    model.generation_config = GenerationConfig.from_model_config(model.config)
    try:
        yield
    finally:
        model.generation_config = before


def _copy_other_files(original: Path, folder: Path) -> None:
    """Tokenizer, processor, chat templates, generation_config.json, model card, code."""
    for file in original.iterdir():
        if file.is_file() and file.name != CONFIG_FILE and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copy2(file, folder / file.name)
    if (original / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(original / TEMPLATES_FOLDER, folder / TEMPLATES_FOLDER, dirs_exist_ok=True)
    if not (original / GENERATION_FILE).is_file():
        (folder / GENERATION_FILE).unlink(missing_ok=True)


def _write_dtype(original: Path, folder: Path, dtypes: SavedDtypes, *, keeps_parts: bool) -> None:
    """Name the dtype of most values in config.json; parts of the configuration keep theirs with `keeps_parts`."""
    settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    before = json.loads((original / CONFIG_FILE).read_text(encoding="utf-8")) if keeps_parts else {}
    _set_dtype(settings, str(dtypes.main).removeprefix("torch."), before)
    settings[_dtype_key(settings)] = str(dtypes.main).removeprefix("torch.")
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _set_dtype(settings: dict[str, Any], dtype: str, before: Mapping[str, Any]) -> None:
    for key, part in settings.items():
        if isinstance(part, dict) and key.endswith("_config"):
            _set_dtype(part, dtype, before.get(key) or {})
            if (name := _dtype_key(part)) in part:
                part[name] = before.get(key, {}).get(name) or dtype


def _dtype_key(settings: Mapping[str, Any]) -> str:
    """`dtype`, or `torch_dtype` in files of transformers 4."""
    return "torch_dtype" if "torch_dtype" in settings and "dtype" not in settings else "dtype"
