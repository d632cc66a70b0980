"""The shape of a model from config.json: parameters and sizes of blocks, without reading weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.learner.policies.families import family_of
from mobula.learner.policies.families.base import Family
from mobula.learner.policies.loading import as_stored, auto_class, checkpoint_names
from mobula.learner.policies.pretrained import PRETRAINED
from mobula.learner.policies.tiny import TINY


@dataclass(frozen=True)
class TowerShape:
    """The blocks of the language model, or of the vision tower."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def attention_width(self) -> int:
        """Values of queries, keys, values and attention output of one token."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class CacheShape:
    """An engine's cache of one sequence: sizes, and numbers of layers by kind."""

    width: int  # values of one token in an attention layer
    num_full: int  # layers that cache every token
    num_windowed: int  # layers that cache the last `window` tokens
    window: int
    num_states: int  # layers with a state of constant size
    state_width: int  # values of one state


@dataclass(frozen=True)
class NetworkShape:
    """Facts of a network for memory estimates. `manifest` has checkpoint names; tied weights are in it once."""

    manifest: Manifest
    largest_block: int  # parameters of the largest block
    num_in_blocks: int  # parameters that belong to some block

    @property
    def num_parameters(self) -> int:
        return sum(prod(spec.shape) for spec in self.manifest.tensors)

    @property
    def largest_tensor(self) -> int:
        return max(prod(spec.shape) for spec in self.manifest.tensors)


@dataclass(frozen=True)
class ModelShape(NetworkShape):
    """Facts of a language model."""

    model_type: str
    text: TowerShape
    cache: CacheShape
    vision: TowerShape | None
    vocab: int
    pixels_per_patch: int  # 0 without a vision tower
    family: Family
    linear_kinds: frozenset[str]  # of all linear layers but the output layer, see `layer_kind`
    decoder: tuple[str, ...]  # names of the decoder's weights below it; checkpoints differ in the names above it


@dataclass(frozen=True)
class ImageShape(NetworkShape):
    """Facts of a model that makes images. Bytes are those of one row of a micro-batch, or of one image, and do not
    include parameters."""

    frozen: tuple[str, ...]  # beginnings of the names of parameters that are not trained
    row_tokens: int  # the row's share of `learner.tokens_per_microbatch`
    least_rows: int  # that a pass computes
    kept: int  # bytes that a forward pass keeps for the backward pass
    kept_inputs: int  # the same with `learner.activation_checkpointing`
    sampled: int  # bytes of the widest pass that samples an image
    decoded: int  # bytes of the widest step that decodes it
    num_others: int  # parameters of the VAE, in the sampler
    num_encoders: int  # parameters of the encoders of a prompt


AnyShape = ModelShape | ImageShape


def shape_of(source: str, *, is_local: bool = False) -> ModelShape:
    """The shape of the checkpoint at `source`, a folder or a hub name; with `is_local` of the hub's cache alone. Reads
    config.json only."""
    return shape_of_config(AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=is_local))


def shape_of_values(values: Mapping[str, Any]) -> ModelShape:
    """The shape of a model from `model_type` and the other values of a config.json."""
    return shape_of_config(AutoConfig.for_model(**values))


def tiny_shape(name: str, *, tie_word_embeddings: bool) -> ModelShape:
    """The shape of the model that `policy.tiny` writes."""
    if name in PRETRAINED:
        return shape_of_config(PRETRAINED[name].config())
    model = TINY[name]
    return shape_of_config(model.new_config(model.new_tokenizer(), tie_word_embeddings=tie_word_embeddings))


def has_config(source: str) -> bool:
    """Whether `source` is a folder with a config.json; else it can only be a hub name."""
    return (Path(source) / "config.json").is_file()


def shape_of_config(config: PretrainedConfig) -> ModelShape:
    """The shape of a model with this configuration, built on torch's meta device."""
    family = family_of(config)
    own, model = family.policy_config(config), described_model(config)
    vision = getattr(own, "vision_config", None)
    blocks = [num_parameters(module) for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    head = model.get_output_embeddings()
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    return ModelShape(
        model_type=family.model_types[0] if config.model_type in family.inner_types else config.model_type,
        manifest=described_manifest(model),
        text=_tower(config.get_text_config()),
        cache=cache_shape(config.get_text_config()),
        vision=None if vision is None else _vision_tower(vision),
        vocab=config.get_text_config().vocab_size,
        largest_block=max(blocks),
        num_in_blocks=sum(blocks),
        family=family,
        linear_kinds=frozenset(map(layer_kind, linear)),
        decoder=_decoder_weights(model),
        pixels_per_patch=0 if vision is None else _pixels(vision.patch_size),
    )


def described_model(config: PretrainedConfig) -> PreTrainedModel:
    """The policy's model with parameters on the meta device."""
    own = family_of(config).policy_config(config)
    with torch.device("meta"):
        return auto_class(own).from_config(own, trust_remote_code=False)


def layer_kind(module: str) -> str:
    """The name of a layer within a block: `q_proj`, or `to_out.0` for a layer in a numbered list."""
    parts = module.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def _decoder_weights(model: PreTrainedModel) -> tuple[str, ...]:
    decoder, saved = {id(parameter) for parameter in model.get_decoder().parameters()}, checkpoint_names(model)
    names = [saved[name] for name, parameter in model.named_parameters() if id(parameter) in decoder and name in saved]
    start = len(commonprefix(names).rpartition(".")[0])
    return tuple(name[start:].removeprefix(".") for name in names)


def described_manifest(model: PreTrainedModel) -> Manifest:
    names, state = checkpoint_names(model), model.state_dict()
    stored = {name: as_stored(model, name, state[key]) for key, name in names.items()}
    return Manifest(tuple(TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in stored.items()))


def _tower(text: PretrainedConfig) -> TowerShape:
    heads = text.num_attention_heads
    return TowerShape(
        num_layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def cache_shape(text: PretrainedConfig) -> CacheShape:
    """By `layer_types`, if config.json has them; models with a latent of keys and values (MLA) cache the latent."""
    tower, window = _tower(text), getattr(text, "sliding_window", None) or 0
    latent = getattr(text, "kv_lora_rank", None)
    usual = "sliding_attention" if window and getattr(text, "use_sliding_window", True) else "full_attention"
    kinds = getattr(text, "layer_types", None) or [usual] * tower.num_layers
    windowed, full = kinds.count("sliding_attention"), kinds.count("full_attention")
    return CacheShape(
        width=latent + text.qk_rope_head_dim if latent else 2 * tower.num_kv_heads * tower.head_dim,
        num_full=full,
        num_windowed=windowed,
        window=window,
        num_states=len(kinds) - full - windowed,
        state_width=_state_width(text) if "linear_attention" in kinds else 0,
    )


def _state_width(text: PretrainedConfig) -> int:
    """Values of a gated delta net's state: inputs of the convolution, and a matrix for each head."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    return (2 * keys + values) * (text.linear_conv_kernel_dim - 1) + values * text.linear_key_head_dim


def _vision_tower(vision: PretrainedConfig) -> TowerShape:
    """The first value present: configurations of vision towers have no common names."""
    hidden = _first(vision, "embed_dim", "hidden_size")  # some call their output width hidden_size
    heads = _first(vision, "num_heads", "num_attention_heads")
    ratio = getattr(vision, "mlp_ratio", None)
    intermediate = int(hidden * ratio) if ratio else vision.intermediate_size
    return TowerShape(
        num_layers=_first(vision, "depth", "num_hidden_layers"),
        hidden=hidden,
        intermediate=intermediate,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
    )


def _pixels(patch_size: int | list[int]) -> int:
    return patch_size**2 if isinstance(patch_size, int) else prod(patch_size)


def _first(config: PretrainedConfig, *names: str) -> int:
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return int(value)
    raise ValueError(f"the vision tower of {config.model_type} has none of {', '.join(names)} in its config.json")


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
