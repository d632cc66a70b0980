"""The base of every configuration section: frozen, typed, unknown keys refused; and the types of bounded fields.

They are pydantic's, or where it is not installed those of `mobula.configs.unvalidated`.
"""

from __future__ import annotations

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
    """One section of a run's configuration. Every field is set in a YAML group; no default hides in code."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )


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
