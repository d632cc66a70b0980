"""Model families, found by the `model_type` of a checkpoint's config.json."""

from mobula.learner.policies.families.registry import (
    AUDIO_TYPES,
    DRAWING_TYPES,
    LANGUAGE,
    PART_NAMES,
    TEXT_FAMILIES,
    VIDEO_TYPES,
    VISION_FAMILIES,
    family_at,
    family_of,
    frozen_prefixes,
    max_positions,
    model_type_at,
    own_family,
    takes_images,
    unequal_window,
)

__all__ = [
    "AUDIO_TYPES",
    "DRAWING_TYPES",
    "LANGUAGE",
    "PART_NAMES",
    "TEXT_FAMILIES",
    "VIDEO_TYPES",
    "VISION_FAMILIES",
    "family_at",
    "family_of",
    "frozen_prefixes",
    "max_positions",
    "model_type_at",
    "own_family",
    "takes_images",
    "unequal_window",
]
