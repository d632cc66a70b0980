"""Reads and writes policies as checkpoints in the Hugging Face layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import Transpose, WeightConverter, revert_weight_conversion
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.utils import logging

from mobula.learner.policies.attention.packed import pack_windows, refuse_without_package
from mobula.learner.policies.families import checkpoint_prefix, family_of, own_family
from mobula.learner.policies.families.vision import method

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # resources.dtype
RANDOM_PARTS = "drop|jitter"  # in names of attributes that hold a probability or the scale of noise


def disable_dropout(model: nn.Module) -> None:
    """Disables randomness of training mode: dropout of layers and attention, layer dropping, router jitter."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and re.search(RANDOM_PARTS, name):
                setattr(module, name, 0.0)
        if isinstance(module, _DropoutNd):
            module.p = 0.0


class PatchProduct(nn.Conv3d):
    """A convolution whose inputs are as large as its kernel, as in many vision towers, computed as a matrix product.

    cuDNN has no fast convolution of this shape in bfloat16 (transformers' issue 45750). On CPU the convolution takes
    about a quarter of an update of a tiny model.
    """

    def forward(self, patches: Tensor) -> Tensor:
        """[n, channels, frames, rows, columns] -> [n, width, 1, 1, 1]"""
        if patches.shape[2:] != self.kernel_size or self.groups > 1 or any(self.padding):
            return super().forward(patches)
        return linear(patches.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


def multiply_patches(model: nn.Module) -> None:
    """Makes each `Conv3d` of the model a `PatchProduct`; its parameters stay as they are."""
    for module in model.modules():
        if type(module) is nn.Conv3d:
            module.__class__ = PatchProduct


def ignore_sampling_defaults(model: PreTrainedModel) -> None:
    """Makes `generate()` ignore penalties, cuts and bans of the checkpoint's generation_config.json: with them, sampled
    tokens would not follow the policy's distribution."""
    model.generation_config = hf.GenerationConfig()


def recompute_blocks(model: nn.Module, kind: str) -> None:
    """Sets activation checkpointing for training mode; `kind` is `learner.activation_checkpointing`."""
    if kind == "none":
        return
    if not isinstance(model, PreTrainedModel):
        method(model, "enable_gradient_checkpointing")()  # of diffusers
    else:
        reentrant = {"use_reentrant": False}  # reentrant checkpointing skips blocks without an input gradient
        model.gradient_checkpointing_enable(reentrant, offload=kind == "blocks_offloaded")


def load_model(source: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Loads the model of a checkpoint folder or hub name, or its policy part, on the CPU."""
    refuse_without_package(attention)
    own = _policy_config(source)
    model = auto_class(own).from_pretrained(
        source, config=own, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )
    model.config.name_or_path = source
    pack_windows(model)
    multiply_patches(model)
    _keep_transposed(model)
    return model


def described_model(
    source: str,
    state: dict[str, Tensor],
    model_class: type[PreTrainedModel] | None,
    dtype: torch.dtype,
    attention: str | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Builds the model of `load_model` (or `model_class`) from tensors without values; also returns the report of
    transformers about missing, unexpected and mismatched keys."""
    own = _policy_config(source)
    automatic: Any = auto_class(own)
    chosen: Any = model_class or automatic._model_mapping[type(own)]  # the automatic class asks for a folder
    with _silent_reports():
        options = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": dtype}
        options |= {"attn_implementation": attention} if attention is not None else {}
        model, info = chosen.from_pretrained(None, config=own, state_dict=state, device_map="meta", **options)
        model.tie_weights(recompute_mapping=False)  # transformers does not tie weights if the files have both
    model.config.name_or_path = source
    multiply_patches(model)
    _keep_transposed(model)
    return model, info


def _policy_config(source: str) -> PretrainedConfig:
    config = hf.AutoConfig.from_pretrained(source, trust_remote_code=False)
    family = own_family(config)
    return config if family is None else family.policy_config(config)


@contextmanager
def _silent_reports() -> Iterator[None]:
    """Suppresses transformers' log table of missing keys, which are reported as an error."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def auto_class(config: PretrainedConfig) -> type[_BaseAutoModelClass]:
    """The auto class that knows this architecture: for image and text, another medium and text, or text."""
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return hf.AutoModelForImageTextToText
    return hf.AutoModelForMultimodalLM if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING else hf.AutoModelForCausalLM


def as_stored(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A view of a model's tensor in the checkpoint's layout; `name` is the name in the model or the checkpoint."""
    return tensor.transpose(-1, -2) if _lies_transposed(model, name) else tensor


def _lies_transposed(model: nn.Module, name: str) -> bool:
    family = own_family(model.config) if isinstance(model, PreTrainedModel) else None
    return family is not None and re.search(family.transposed, name) is not None


def _keep_transposed(model: PreTrainedModel) -> None:
    """Prevents transformers from transposing tensors of `as_stored` again when it saves a model."""
    kept = getattr(model, "_weight_conversions", None)
    if kept:
        vars(model)["_weight_conversions"] = [
            one
            for one in kept
            if not (isinstance(one, WeightConverter) and all(isinstance(part, Transpose) for part in one.operations))
        ]
    for name, parameter in model.named_parameters():
        if _lies_transposed(model, name) and parameter.shape[-1] == parameter.shape[-2]:
            raise ValueError(
                f"policy.model has {name} with the square shape {tuple(parameter.shape)}, of which transformers cannot "
                "tell whether the checkpoint holds it transposed: choose a checkpoint with other widths"
            )


def freeze(model: PreTrainedModel, prefixes: tuple[str, ...]) -> None:
    """Freezes parameters by prefix of the checkpoint name, or by part of the model."""
    if not prefixes:
        return
    parameters = dict(model.named_parameters())
    names = {state: name for state, name in checkpoint_names(model).items() if state in parameters}
    family = family_of(model.config, model.config.name_or_path)
    refuse_unknown_prefixes(prefixes, family.parts, list(names.values()))
    for state_name, name in names.items():
        if name.startswith(family.starts(prefixes)):
            parameters[state_name].requires_grad_(False)


def refuse_unknown_prefixes(
    prefixes: tuple[str, ...], parts: Mapping[str, tuple[str, ...]], names: Sequence[str]
) -> None:
    """Checks that each entry of `policy.freeze` is a part of the family, or a prefix of a checkpoint name."""
    for prefix in prefixes:
        if not any(name.startswith(parts.get(prefix, (prefix,))) for name in names):
            split = [name.split(".") for name in names]
            stems = {".".join(words[: i + 1]) + "." for words in split for i in range(len(words) - 1)}
            nearest = get_close_matches(prefix, sorted(stems), n=3, cutoff=0.0)
            choices = ", ".join([*nearest, *parts])
            raise ValueError(
                f"policy.freeze: no parameter of the checkpoint starts with {prefix!r}; the nearest are {choices}: "
                "use one of them, or take it out of policy.freeze"
            )


def checkpoint_names(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, str]:
    """State-dict name -> name in a saved checkpoint, which engines load by. Tied weights are left out: loading restores
    them from the tensors that they are tied to. `state` replaces the model's state dict.

    Only transformers renames and ties weights when it saves a model; diffusers saves the state dict unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        return {name: name for name in model.state_dict()}
    tied = set(model.all_tied_weights_keys)
    prefix, names = checkpoint_prefix(model.config), {}
    for name, tensor in (model.state_dict() if state is None else state).items():
        if name in tied:
            continue
        saved = saved_names(model, name, tensor)
        if len(saved) != 1:
            raise ValueError(
                f"policy.model: the checkpoint holds {name} as {len(saved)} tensors ({', '.join(saved)}); "
                "only models that save each tensor as one can be trained here"
            )
        names[name] = prefix + saved[0]
    if len(set(names.values())) != len(names):
        raise ValueError(
            "policy.model: several tensors of the model are one in its checkpoint; "
            "only models that save each tensor as one can be trained here"
        )
    return names


def saved_names(model: PreTrainedModel, name: str, tensor: Tensor) -> list[str]:
    return list(revert_weight_conversion(model, {name: torch.empty(tensor.shape, device="meta")}))
