"""Registry of the model families of token policies, by `model_type` of a checkpoint's config.json."""

from __future__ import annotations

import transformers
from transformers import AutoConfig, PreTrainedConfig

from mobula.configs.schema import PolicyConfig
from mobula.learner.policies.families.audio.qwen2_5_omni import Qwen25Omni
from mobula.learner.policies.families.audio.qwen2_audio import Qwen2Audio
from mobula.learner.policies.families.base import AudioFamily, Family, VideoFamily
from mobula.learner.policies.families.gemma3 import Gemma3
from mobula.learner.policies.families.glm4v import Glm4v
from mobula.learner.policies.families.idefics import Idefics
from mobula.learner.policies.families.internvl import InternVL
from mobula.learner.policies.families.llava_onevision import LlavaOneVision
from mobula.learner.policies.families.qwen3_5 import Qwen35
from mobula.learner.policies.families.qwen3_vl import Qwen3VL, Qwen3VLMoe
from mobula.learner.policies.families.qwen_vl import QwenVL
from mobula.learner.policies.families.refused import REFUSED
from mobula.learner.policies.families.text import Janus, TextFamily
from mobula.learner.policies.families.unknown import UnknownFamily

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
DRAWING_TYPES = tuple(kind for kind, family in BY_MODEL_TYPE.items() if family.makes_images)
TEXT_FAMILIES = tuple(kind for kind in BY_MODEL_TYPE if kind not in (*VISION_FAMILIES, *AUDIO_TYPES, *DRAWING_TYPES))


def family_of(config: PreTrainedConfig, source: str | None = "", key: str = "policy.model") -> Family:
    """The family of a model with this config, which was read from `source`, the value of `key`.

    A model type without a file is an `UnknownFamily` if transformers loads it as image and text to text.

    Raises:
        ValueError: it is of a family that cannot be computed here.
    """
    kind = config.model_type
    _refuse_scaled_logits(config, source, key)
    if kind in INNER:
        return INNER[kind]
    if kind not in BY_MODEL_TYPE and kind not in REFUSED and UnknownFamily.takes(config):
        return UNKNOWN
    if kind not in BY_MODEL_TYPE:
        why = f" ({REFUSED[kind]})" if kind in REFUSED else ""
        raise ValueError(f"{key}={source} is of the model type {kind}, which is not supported{why}: {_known()}")
    return BY_MODEL_TYPE[kind]


def _refuse_scaled_logits(config: PreTrainedConfig, source: str | None, key: str) -> None:
    """Refuses a model that changes logits after its output embeddings, or attention scores before the softmax."""
    text = config.get_text_config()
    scales = {name: getattr(text, name, None) for name in LOGIT_SCALES}
    scales = {name: value for name, value in scales.items() if value not in (None, 1, 0)}
    if scales and config.model_type not in REFUSED:
        name, value = next(iter(scales.items()))
        raise ValueError(
            f"{key}={source} has {name}={value} in its config.json, and no logits are capped or scaled here: choose a "
            f"checkpoint without it; {_known()}"
        )


def unequal_window(source: str) -> int | None:
    """Returns the sliding window if vLLM and transformers apply it to different layers of a checkpoint, else None.

    vLLM applies a window to all layers of most types, transformers to those that `layer_types` names.
    """
    text = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    window = getattr(text, "sliding_window", None)
    if not window or text.model_type in WINDOWS_BY_LAYER:
        return None
    default = ["sliding_attention" if text.model_type in WINDOWS_EVERYWHERE else "full_attention"]
    layers = getattr(text, "layer_types", None) or default
    return None if set(layers) == {"sliding_attention"} else window


def own_family(config: PreTrainedConfig) -> Family | None:
    """Returns the registered family of a model, or of the policy within it; None if it has no file."""
    return INNER.get(config.model_type) or BY_MODEL_TYPE.get(config.model_type)


def family_at(source: str, key: str = "policy.model") -> Family:
    """The family of the checkpoint at `source`, the value of `key`.

    Raises:
        ValueError: it is of a family that cannot be computed here.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{key}={source} has a config.json that transformers {transformers.__version__} cannot use "
            f"({str(error).splitlines()[0]}): {_known()}"
        ) from error
    return family_of(config, source, key)


def model_type_at(source: str) -> str:
    """`model_type` of the checkpoint at `source`."""
    return AutoConfig.from_pretrained(source, trust_remote_code=False).model_type


def takes_images(source: str, key: str = "policy.model") -> bool:
    """Whether the checkpoint at `source` (the value of `key`) is of a vision-language family; else it is text-only.

    Raises:
        ValueError: it is of a family that cannot be computed here.
    """
    return family_at(source, key).takes_images


def frozen_prefixes(policy: PolicyConfig) -> tuple[str, ...]:
    """Returns `policy.freeze` as prefixes of checkpoint names; a part of the family expands to its prefixes."""
    if not policy.freeze:
        return ()
    parts = family_at(policy.model).parts
    return tuple(start for entry in policy.freeze for start in parts.get(entry, (entry,)))


def max_positions(source: str) -> int | None:
    """Returns the maximum sequence length of the checkpoint's positions; None if config.json has only a factor."""
    text = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    return None if "factor" in str(rope) else text.max_position_embeddings


def _known() -> str:
    return (
        f"choose a vision-language checkpoint of type {', '.join(VISION_FAMILIES)}, one that hears of type "
        f"{', '.join(AUDIO_TYPES)}, or a text-only one of type {', '.join(TEXT_FAMILIES)}"
    )
