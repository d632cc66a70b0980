"""The base of every configuration section: frozen, typed, unknown keys refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError


def _refuse_empty(value: Any) -> Any:
    if value == "":
        raise PydanticCustomError("empty", "empty")
    return value


NOT_EMPTY = BeforeValidator(_refuse_empty)
"""For a text that names something; an empty path would be the current directory."""


class Section(BaseModel):
    """One section of a run's configuration. Every field is set in a YAML group; no default hides in code."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )
