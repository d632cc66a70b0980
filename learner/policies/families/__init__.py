"""Model families, found by the `model_type` of a checkpoint's config.json."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import ModelOutput

from mobula.configs.schema import PolicyConfig
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import MediaBatch, TokenBatch
from mobula.learner.policies.families.audio import Qwen2Audio, Qwen25Omni
from mobula.learner.policies.families.base import AudioFamily, Family, VideoFamily
from mobula.learner.policies.families.vision import (
    Qwen3VL,
    Qwen3VLMoe,
    Qwen35,
    QwenVL,
    VisionFamily,
    image_settings,
    method,
)
from mobula.learner.policies.families.vision_models import Gemma3, Glm4v, Idefics, InternVL, LlavaOneVision
from mobula.learner.policies.nextstep.model import PARTS, NextStepConfig

REFUSED = {
    "qwen3_5_moe": "its experts lie transposed and choose for themselves as those of qwen3_vl_moe do, vLLM on CPU "
    "computes its other layers in bfloat16 alone, and engine and learner were never compared",
    "kimi_vl": "transformers does not load it without remote code",
    "gemma3n": "its decoder takes embeddings of every layer, which a learner does not compute here",
    "gemma2": "its logits are capped behind the output embeddings, which is not computed here",
}
"""`model_type` -> why."""


class TextFamily(Family):
    """Models whose logits are the output embeddings times the decoder's last state."""

    model_types = ("gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
    # Tokenizers of text models may have the tokens of their vision-language siblings.
    media_tokens = r"<\|(image_pad|video_pad|vision_start|vision_end|vision_pad)\|>"
    parts = {}
    takes_images = False

    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        if batch.media.inputs:
            raise ValueError(
                f"policy.model is of type {model.config.model_type}, which takes no images here, "
                "but a prompt has some: use a vision-language model, or remove images from the data"
            )
        embeds = model.get_input_embeddings()(batch.input_ids)
        return model.get_decoder()(inputs_embeds=embeds, use_cache=False).last_hidden_state


class DrawingFamily(Family):
    """Models whose answers are images."""

    media_tokens = ""
    takes_images = False
    without_images = "policy.model draws images, and is trained on texts here"

    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        kind, sampler = self.model_types[0], self.image_sampler
        raise ValueError(f"a policy of type {kind} answers with image tokens here: set sampler={sampler}")


class Janus(DrawingFamily):
    """`mobula.learner.policies.image_tokens` computes its image tokens."""

    model_types = ("janus",)
    image_sampler = "image_tokens"
    parts = {
        "vision": ("model.vision_model.", "model.aligner."),
        "vq": ("model.vqmodel.",),
        "language": ("model.language_model.", "lm_head."),
    }


class AutoregressiveFlow(DrawingFamily):
    """`mobula.learner.policies.flow.patches` computes its continuous image tokens."""

    model_types = (NextStepConfig.model_type,)
    image_sampler = "image_patches"
    parts = PARTS
    folders = ("vae",)


BLANK_SIDE = 56  # pixels of the image that a batch without images shows the tower
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
GRIDS = ("image_grid_thw", "image_sizes")  # arguments of forward() that say how large each image is


class UnknownFamily(VisionFamily):
    """A model that transformers loads as image-text-to-text and whose base takes `mm_encoder_outputs`.

    Every argument of forward() that depends on images is passed by name. This may not be enough, so a run compares
    engine and learner before its first step and is refused if they differ.
    """

    model_types = ()
    media_tokens = ""  # see `media_token_ids`
    parts = {}
    needs_gate = True
    shares_prefixes = False  # its positions may depend on the whole row
    padded_because = "it has no family file, and its decoder may not keep rows apart"

    @classmethod
    def takes(cls, config: PreTrainedConfig) -> bool:
        """Returns whether this class may support a model with this config."""
        return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and hasattr(config, "image_token_id")

    def media_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Returns all special tokens that contain the name of a medium."""
        added = tokenizer.added_tokens_decoder.items()
        about = re.compile("image|img|video|vision|audio|frame|row_|col_", re.IGNORECASE)
        return tuple(i for i, token in added if token.special and about.search(token.content))

    def refuse_unfit(self, processor: ProcessorMixin, config: PreTrainedConfig) -> None:
        if type(processor).replace_image_token is ProcessorMixin.replace_image_token:
            raise ValueError(
                f"policy.model is of type {config.model_type}, which has no family file, and its "
                f"{type(processor).__name__} does not say what an image becomes in a prompt: choose a supported type"
            )
        if self.placeholder_id(config) not in self.media_token_ids(processor.tokenizer):
            raise ValueError(
                f"policy.model is of type {config.model_type}, which has no family file, and the token of its images "
                f"({self.placeholder_id(config)}) is not a special one named after them: choose a supported type"
            )

    def process(self, processor: ProcessorMixin, image: Image.Image) -> dict[str, np.ndarray]:
        made = processor.image_processor(images=[image], return_tensors="pt", **image_settings(processor))
        tensors = {name: value.numpy() for name, value in made.items() if isinstance(value, Tensor) and value.dim()}
        return {"pixel_values": tensors.pop("pixel_values"), **tensors}

    def encode_shared(
        self,
        core: PreTrainedModel,
        batch: TokenBatch,
        ranks: SequenceRanks | None,
        inputs: Mapping[str, Tensor],
        media: Sequence[MediaBatch],
    ) -> ModelOutput:
        """Encodes all media on every rank: the share of an image in the tensors is unknown."""
        return self.encode(core, inputs)

    def encode(self, core: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ModelOutput:
        taken = inspect.signature(inspect.unwrap(method(core, "get_image_features"))).parameters
        device = inputs["pixel_values"].device  # grids are on the host
        return super().encode(core, {name: tensor.to(device) for name, tensor in inputs.items() if name in taken})

    def decoder_inputs(self, core: PreTrainedModel, batch: TokenBatch, token_types: Tensor) -> dict[str, Any]:
        taken = inspect.signature(type(core).forward).parameters
        if "mm_encoder_outputs" not in taken:
            raise ValueError(
                f"policy.model is a {type(core).__name__}, whose forward() takes no mm_encoder_outputs: choose a "
                "checkpoint of a supported type"
            )
        if "rope_deltas" in vars(core):  # of the batch before
            vars(core)["rope_deltas"] = None
        device = batch.input_ids.device
        inputs = {name: token_types.to(device) for name in TOKEN_TYPES if name in taken}
        order = list(batch.media.order)
        for name in GRIDS:
            if name in taken and name in batch.media.inputs:
                inputs[name] = batch.media.inputs[name][order].to(device)
        return inputs

    def generate_inputs(self, model: PreTrainedModel, token_types: Tensor) -> dict[str, Tensor]:
        taken = inspect.signature(type(self.core(model)).forward).parameters
        return {name: token_types for name in TOKEN_TYPES if name in taken}

    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        processor = transformers.AutoProcessor.from_pretrained(config.name_or_path, trust_remote_code=False)
        made = self.process(processor, Image.new("RGB", (BLANK_SIDE, BLANK_SIDE)))
        return {name: on_device(array, device) for name, array in made.items()}


FAMILIES: tuple[Family, ...] = (
    QwenVL(),
    Qwen3VL(),
    Qwen3VLMoe(),
    Qwen35(),
    Glm4v(),
    InternVL(),
    LlavaOneVision(),
    Idefics(),
    Gemma3(),
    Qwen2Audio(),
    Qwen25Omni(),
    TextFamily(),
    Janus(),
    AutoregressiveFlow(),
)
UNKNOWN = UnknownFamily()
LANGUAGE = "language"  # the decoder, a part of every family where adapters are placed
PART_NAMES = frozenset({LANGUAGE, *(part for family in FAMILIES for part in family.parts)})
LOGIT_SCALES = (
    "final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"
)  # fmt: skip
"""Keys of config.json that change logits or attention scores."""
WINDOWS_BY_LAYER = ("gemma3", "gemma3_text")  # text types whose `layer_types` vLLM follows layer by layer
WINDOWS_EVERYWHERE = ("mistral",)  # text types without `layer_types`, in which transformers applies the window too
BY_MODEL_TYPE = {kind: family for family in FAMILIES for kind in family.model_types}
INNER = {kind: family for family in FAMILIES for kind in family.inner_types}
VISION_FAMILIES = tuple(kind for kind, family in BY_MODEL_TYPE.items() if family.takes_images)
VIDEO_TYPES = tuple(kind for kind, family in BY_MODEL_TYPE.items() if isinstance(family, VideoFamily))
AUDIO_TYPES = tuple(kind for kind, family in BY_MODEL_TYPE.items() if isinstance(family, AudioFamily))
DRAWING_TYPES = tuple(kind for kind, family in BY_MODEL_TYPE.items() if family.image_sampler)
TEXT_FAMILIES = tuple(kind for kind in BY_MODEL_TYPE if kind not in (*VISION_FAMILIES, *AUDIO_TYPES, *DRAWING_TYPES))


def family_of(config: PreTrainedConfig, source: str | None = "", key: str = "policy.model") -> Family:
    """The family of a model with this config, which was read from `source`, the value of `key`.

    A model type without a file is an `UnknownFamily` if transformers loads it as image and text to text.
    """
    kind = config.model_type
    # Some models change logits after their output embeddings, or attention scores before the softmax.
    text = config.get_text_config()
    scales = {name: getattr(text, name, None) for name in LOGIT_SCALES}
    scales = {name: value for name, value in scales.items() if value not in (None, 1, 0)}
    if scales and config.model_type not in REFUSED:
        name, value = next(iter(scales.items()))
        raise ValueError(
            f"{key}={source} has {name}={value} in its config.json, and no logits are capped or scaled here: choose a "
            f"checkpoint without it; {_known()}"
        )
    if kind in INNER:
        return INNER[kind]
    if kind not in BY_MODEL_TYPE and kind not in REFUSED and UnknownFamily.takes(config):
        return UNKNOWN
    if kind not in BY_MODEL_TYPE:
        why = f" ({REFUSED[kind]})" if kind in REFUSED else ""
        raise ValueError(f"{key}={source} is of the model type {kind}, which is not supported{why}: {_known()}")
    return BY_MODEL_TYPE[kind]


def unequal_window(source: str) -> int | None:
    """Returns the sliding window if vLLM and transformers apply it to different layers of a checkpoint, else None.

    vLLM applies a window to all layers of most types, transformers to those that `layer_types` names.
    """
    text = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    window = getattr(text, "sliding_window", None)
    if not window or text.model_type in WINDOWS_BY_LAYER:
        return None
    default = ["sliding_attention" if text.model_type in WINDOWS_EVERYWHERE else "full_attention"]
    layers = getattr(text, "layer_types", None) or default
    return None if set(layers) == {"sliding_attention"} else window


def own_family(config: PreTrainedConfig) -> Family | None:
    """Returns the registered family of a model, or of the policy within it; None if it has no file."""
    return INNER.get(config.model_type) or BY_MODEL_TYPE.get(config.model_type)


def checkpoint_prefix(config: PreTrainedConfig) -> str:
    """The prefix of a policy's names in a checkpoint with further parts; else empty."""
    family = own_family(config)
    return "" if family is None else family.checkpoint_prefix


def family_at(source: str, key: str = "policy.model") -> Family:
    """The family of the checkpoint at `source`, the value of `key`."""
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{key}={source} has a config.json that transformers {transformers.__version__} cannot use "
            f"({str(error).splitlines()[0]}): {_known()}"
        ) from error
    return family_of(config, source, key)


def model_type_at(source: str) -> str:
    """`model_type` of the checkpoint at `source`."""
    return transformers.AutoConfig.from_pretrained(source, trust_remote_code=False).model_type


def takes_images(source: str, key: str = "policy.model") -> bool:
    """Whether the checkpoint at `source` (the value of `key`) is of a vision-language family; else it is text-only."""
    return family_at(source, key).takes_images


def frozen_prefixes(policy: PolicyConfig) -> tuple[str, ...]:
    """Returns `policy.freeze` as prefixes of checkpoint names."""
    names_part = not PART_NAMES.isdisjoint(policy.freeze)
    return family_at(policy.model).starts(policy.freeze) if names_part else policy.freeze


def max_positions(source: str) -> int | None:
    """Returns the maximum sequence length of the checkpoint's positions; None if config.json has only a factor."""
    text = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    return None if "factor" in str(rope) else text.max_position_embeddings


def _known() -> str:
    return (
        f"choose a vision-language checkpoint of type {', '.join(VISION_FAMILIES)}, one that hears of type "
        f"{', '.join(AUDIO_TYPES)}, or a text-only one of type {', '.join(TEXT_FAMILIES)}"
    )
