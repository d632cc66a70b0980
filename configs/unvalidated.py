"""The parts of pydantic that the schema uses, for machines without it: values are built and not validated.

A section is built from values that a validated configuration would have: its fields are converted to their annotated
types, and a missing or an unknown key is an error. Bounds and patterns are not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

NonNegativeFloat = PositiveFloat = float
NonNegativeInt = PositiveInt = int
PydanticCustomError = ValueError
ConfigDict = dict


def Field(**_: Any) -> None:
    """Bounds of a value, which are not checked."""


def BeforeValidator(_: Any) -> None:
    """A check of one value, which is left out."""


def model_validator(*, mode: str) -> Callable[[Any], Any]:
    """Marks a method that returns the values to build from; `mode` is `before`."""

    def mark(method: Any) -> Any:
        getattr(method, "__func__", method).validates = mode
        return method

    return mark


@dataclass(frozen=True)
class FieldInfo:
    """Type and default of a field."""

    annotation: Any
    default: Any

    def is_required(self) -> bool:
        return self.default is ...


class _Fields:
    """The fields of a class, which are read once all modules are imported."""

    def __get__(self, _: object, section: type[BaseModel]) -> Mapping[str, FieldInfo]:
        return _fields(section)


class BaseModel:
    """A frozen section whose fields are its annotations."""

    model_config: ClassVar[dict[str, Any]]
    model_fields: ClassVar = _Fields()

    def __init__(self, **values: Any) -> None:
        fields = type(self).model_fields
        values = {name: info.default for name, info in fields.items() if not info.is_required()} | values
        if values.keys() != fields.keys():
            wrong = ", ".join(sorted(values.keys() ^ fields.keys()))
            raise ValueError(f"{type(self).__name__} has the keys {', '.join(fields)}: missing or unknown are {wrong}")
        self.__dict__.update({name: _built(info.annotation, values[name]) for name, info in fields.items()})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is frozen: use model_copy")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @classmethod
    def model_validate(cls, values: Any) -> Self:
        """A section of nested mappings."""
        for prepare in _validators(cls):
            values = prepare.__get__(None, cls)(values)
        return cls(**values)

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """The section with some fields replaced; nothing is checked."""
        copy = object.__new__(type(self))
        copy.__dict__.update({**self.__dict__, **update})
        return copy

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Nested mappings of plain values."""
        return {name: _dumped(value) for name, value in self.__dict__.items()}

    def model_dump_json(self) -> str:
        return json.dumps(self.model_dump(), default=str)


def _fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields by name, those of base classes first."""
    hints = {name: hint for name, hint in get_type_hints(section).items() if get_origin(hint) is not ClassVar}
    return {name: FieldInfo(hint, getattr(section, name, ...)) for name, hint in hints.items() if hint is not ClassVar}


def _validators(section: type[BaseModel]) -> tuple[Any, ...]:
    """The methods that `model_validator` marked."""
    members = {name: member for base in reversed(section.__mro__) for name, member in vars(base).items()}
    return tuple(m for m in members.values() if getattr(getattr(m, "__func__", m), "validates", "") == "before")


def _built(hint: Any, value: Any) -> Any:
    """`value`, of JSON or built before, as the annotated type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return value if value is None else _built(next(a for a in arguments if a is not type(None)), value)
    if origin is tuple:
        return tuple(_built(arguments[0], item) for item in value)
    if origin is dict:
        return {key: _built(arguments[1], item) for key, item in value.items()}
    if hint is Any or not isinstance(hint, type) or isinstance(value, hint):
        return value
    if issubclass(hint, BaseModel):
        return hint.model_validate(value)
    return hint(value) if issubclass(hint, float | Path | Enum) else value


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: _dumped(item) for key, item in value.items()}
    return [_dumped(item) for item in value] if isinstance(value, tuple | list) else value
