"""The base of every configuration section: frozen, typed, unknown keys refused; and the types of bounded fields.

They are pydantic's, or where it is not installed those of `mobula.configs.unvalidated`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

try:
    from pydantic import (
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        NonNegativeFloat,
        NonNegativeInt,
        PositiveFloat,
        PositiveInt,
        model_validator,
    )
    from pydantic_core import PydanticCustomError
except ModuleNotFoundError:  # a GPU machine without this project's environment, where `gpu_check` runs
    # mypy takes the stand-ins for second definitions of pydantic's names.
    from mobula.configs.unvalidated import (  # type: ignore[assignment,no-redef]
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        NonNegativeFloat,
        NonNegativeInt,
        PositiveFloat,
        PositiveInt,
        PydanticCustomError,
        model_validator,
    )

__all__ = [
    "NOT_EMPTY",
    "ByDtype",
    "Field",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Section",
    "UserCode",
    "defaults",
    "model_validator",
]


def _refuse_empty(value: Any) -> Any:
    if value == "":
        raise PydanticCustomError("empty", "empty")
    return value


UserCode = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$")]
"""Code of the user in the place of a built-in name: `module:name`, or `path/to/file.py:name` from the working directory
of the command. `mobula.cluster.user_code` resolves it, where it is used."""

NOT_EMPTY = BeforeValidator(_refuse_empty)
"""For a text that names something; an empty path would be the current directory."""


class Section(BaseModel):
    """One section of a run's configuration. A default stands in its field and nowhere else; a field without one is set
    by every option of its YAML group, or by the user."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )


def defaults(section: type[Section]) -> dict[str, Any]:
    """Key -> default of every field that has one, as values of JSON; of a section without one, those of its fields."""
    values: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        if not info.is_required():
            values[name] = info.default
        elif isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            values[name] = defaults(info.annotation)
    return json.loads(json.dumps(values, default=lambda v: v.model_dump() if isinstance(v, Section) else str(v)))


class ByDtype(Section):
    """A bound for each value of `resources.dtype`. One number in place of the section is the bound for both."""

    float32: Annotated[float, Field(ge=0)]
    """Bound of float32."""
    bfloat16: Annotated[float, Field(ge=0)]
    """Bound of bfloat16."""

    @model_validator(mode="before")
    @classmethod
    def _for_both(cls, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return dict.fromkeys(("float32", "bfloat16"), value) if is_number else value

    def of(self, dtype: str) -> float:
        """The bound of `dtype`, a value of `resources.dtype`."""
        return {"float32": self.float32, "bfloat16": self.bfloat16}[dtype]
