"""Section: frozen, typed base class of configuration sections, which refuses unknown keys; types of bounded fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def _refuse_empty(value: Any) -> Any:
    if value == "":
        raise PydanticCustomError("empty", "empty")
    return value


UserCode = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$")]
"""User code instead of a built-in name: `module:name`, or `path/to/file.py:name` relative to the working directory of
the command. `mobula.cluster.user_code` resolves it."""

NOT_EMPTY = BeforeValidator(_refuse_empty)
"""Refuses an empty text: an empty path would be the current directory."""


class Section(BaseModel):
    """A section of a run's configuration. Fields hold the defaults; a field without a default is set by every option of
    the YAML group, or by the user."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True
    )
    shared_kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Kind section -> further values of its key that select it."""


def defaults(section: type[Section]) -> dict[str, Any]:
    """Key -> default as a JSON value, for fields with a default. Sections without a default are entered recursively."""
    values: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        if not info.is_required():
            values[name] = info.default
        elif isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            values[name] = defaults(info.annotation)
    return json.loads(json.dumps(values, default=lambda v: v.model_dump() if isinstance(v, Section) else str(v)))


ITEM = "INDEX"
"""Placeholder for an index of a list, e.g. `rewards.components.INDEX.weight`."""
ENTRY = "NAME"
"""Placeholder for a name chosen by the user, e.g. `rewards.recipes.NAME.weights`."""


def section_below(annotation: Any) -> tuple[type[Section] | None, str]:
    """Returns the section type of a field (None if it is no section), and the path from the field to the section's
    keys: empty, or a placeholder for the entries of a list or mapping.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, ""
    containers = {tuple: (0, f"{ITEM}."), dict: (1, f"{ENTRY}.")}
    if get_origin(annotation) in containers:
        position, path = containers[get_origin(annotation)]
        item = get_args(annotation)[position]
        if isinstance(item, type) and issubclass(item, Section):
            return item, path
    return None, ""


def _values(annotation: Any) -> frozenset[str]:
    if get_origin(annotation) is Literal:
        return frozenset(map(str, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return frozenset(member.value for member in annotation)
    return frozenset(name for part in get_args(annotation) for name in _values(part))


def kinds(section: type[Section]) -> dict[str, str]:
    """Kind sections of `section`: name of the sub-section -> the key that selects it, e.g. `vllm` -> `kind`. A kind
    section has the name of a value of its key. The run reads it if the key has this value or names user code."""
    fields = section.model_fields
    below = [name for name, info in fields.items() if section_below(info.annotation)[0] is not None]
    return {name: key for name in below for key, info in fields.items() if name in _values(info.annotation)}


def unread(section: type[Section], values: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, str, str]]:
    """Finds the kind sections in `values` that are not selected.

    Args:
        start: prefix of the dotted names, with the final dot.

    Yields:
        Dotted name of the kind section, dotted name of its key, and the key's value.
    """
    keys = kinds(section)
    for name, info in section.model_fields.items():
        below, path = section_below(info.annotation)
        held, key = values.get(name), keys.get(name, "")
        if below is None or not isinstance(held, Mapping):
            continue
        chosen = values.get(key, name)
        selects = chosen in (name, *section.shared_kinds.get(name, ()))
        if isinstance(chosen, str) and not selects and chosen in _values(section.model_fields[key].annotation):
            yield f"{start}{name}", f"{start}{key}", chosen
            continue
        for entry, part in ({"": held} if not path else {f"{entry}.": part for entry, part in held.items()}).items():
            if isinstance(part, Mapping):
                yield from unread(below, part, f"{start}{name}.{entry}")


def without_unread(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `values` without kind sections that are not selected."""

    def pruned(part: Any, start: str) -> Any:
        if not isinstance(part, Mapping):
            return part
        return {key: pruned(value, f"{start}{key}.") for key, value in part.items() if f"{start}{key}" not in dropped}

    dropped = {name for name, *_ in unread(section, values)}
    return pruned(values, "")


class ByDtype(Section):
    """A bound for each value of `resources.dtype`. A single number instead of the section sets both."""

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
