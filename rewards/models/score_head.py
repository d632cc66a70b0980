"""Classes of reward models: transformers' classifier, or a vision-language model with a linear score head."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification


def read_config(name: str) -> PreTrainedConfig:
    """Reads the configuration of a checkpoint.

    Raises:
        ValueError: the checkpoint has none.
    """
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"options.model={name!r} is no checkpoint ({reason}): name a folder with its files") from error


def takes_images(config: PreTrainedConfig) -> bool:
    return getattr(config, "vision_config", None) is not None


def classifier_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns transformers' sequence classifier of this architecture, or the base model with a `score` head.

    Like the heads of transformers, it is one bias-free linear layer, `score.weight` [labels, hidden], on the last
    hidden state of the last token that is not padding; the other weights, `model.*`, are the base model's.

    Raises:
        ValueError: the architecture is unknown.
    """
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]  # type: ignore[return-value]  # it is a class
    if type(config) not in MODEL_MAPPING:
        raise ValueError(f"options.model is of type {config.model_type!r}, which is unknown here: use another")
    return _with_score_head(MODEL_MAPPING[type(config)])


@cache
def _with_score_head(base: Any) -> type[PreTrainedModel]:
    """Builds a classifier over `base` with the same configuration, initialisation and key conversions."""
    family = next(c for c in base.__mro__[1:] if issubclass(c, PreTrainedModel))
    name = f"{base.__name__.removesuffix('Model')}ForSequenceClassification"
    return type(name, (GenericForSequenceClassification, family), {"__doc__": _with_score_head.__doc__})
