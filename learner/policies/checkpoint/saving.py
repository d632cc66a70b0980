"""Saves policies in the Hugging Face layout, with the dtypes and the other files of the source checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from mobula.learner.policies.checkpoint.stored import SavedDtypes, checkpoint_folder
from mobula.learner.policies.checkpoint.writing import write_weights
from mobula.learner.policies.families import own_family
from mobula.learner.policies.loading import as_stored, saved_names

CONFIG_FILE = "config.json"
TEMPLATES_FOLDER = "additional_chat_templates"
WEIGHTS_STEM, MAX_FILE_SIZE = "model", "50GB"  # as in transformers
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
    model: PreTrainedModel,
    source: str,
    folder: Path,
    described: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: str = "",
) -> None:
    """Writes a checkpoint that transformers and vLLM load like `source`, and copies the other files of `source`.

    Each tensor keeps its dtype in `source`; config.json names the dtype of most values. One tensor is held at a time.

    Args:
        source: `policy.model`.
        described: state-dict name -> tensor with the shape of the whole tensor; values are not read.
        tensors: (state-dict name, whole tensor) of each.
        dtype: dtype of all tensors; empty: each tensor keeps its dtype.
    """
    folder.mkdir(parents=True, exist_ok=True)
    original = checkpoint_folder(source)
    dtypes, names = SavedDtypes.of_model(original, dtype), {}
    tied = set(model.all_tied_weights_keys)  # loading restores them from the tensors they are tied to
    family = own_family(model.config)
    prefix = "" if family is None else family.checkpoint_prefix
    for name, tensor in described.items():
        if name not in tied:
            [saved] = saved_names(model, name, tensor)
            names[name] = prefix + saved
    files = {names[n]: dtypes.described(names[n], as_stored(model, n, t)) for n, t in described.items() if n in names}
    cast = ((names[n], dtypes.cast(names[n], as_stored(model, n, t))) for n, t in tensors if n in names)
    write_weights(folder, WEIGHTS_STEM, files, cast, MAX_FILE_SIZE)
    if prefix:
        shutil.copy2(original / CONFIG_FILE, folder / CONFIG_FILE)
    else:
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.save_pretrained(folder)
    _copy_other_files(original, folder)
    _write_dtype(original, folder, dtypes, keeps_parts=not dtype)


def _copy_other_files(original: Path, folder: Path) -> None:
    """Copies tokenizer, processor, chat templates, generation_config.json, model card and code."""
    for file in original.iterdir():
        if file.is_file() and file.name != CONFIG_FILE and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copy2(file, folder / file.name)
    if (original / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(original / TEMPLATES_FOLDER, folder / TEMPLATES_FOLDER, dirs_exist_ok=True)


def _write_dtype(original: Path, folder: Path, dtypes: SavedDtypes, *, keeps_parts: bool) -> None:
    """Writes the main dtype to config.json; with `keeps_parts`, parts of the configuration keep their dtypes."""
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
