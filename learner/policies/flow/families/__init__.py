"""Families of flow models."""

from mobula.learner.policies.flow.families.base import Conditions, FlowFamily, ImageSize, Schedule
from mobula.learner.policies.flow.families.pipelines import (
    FAMILIES,
    INDEX,
    REFUSED,
    TRANSFORMER,
    flow_family_at,
    pipeline_index,
)

__all__ = [
    "FAMILIES",
    "INDEX",
    "REFUSED",
    "TRANSFORMER",
    "Conditions",
    "FlowFamily",
    "ImageSize",
    "Schedule",
    "flow_family_at",
    "pipeline_index",
]
