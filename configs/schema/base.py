"""The base of every configuration section: frozen, typed, unknown keys refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of a run's configuration. Every field is set in a YAML group; no default hides in code."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )
