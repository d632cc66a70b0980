"""Every dotted key of the schema: expected value and description; suggestions for unknown keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from mobula.configs.groups import MISSING
from mobula.configs.schema.base import ENTRY, ITEM, NOT_EMPTY, Section, defaults, kinds, section_below
from mobula.configs.schema.run import RunConfig

BOUNDS = {"gt": "more than {}", "ge": "at least {}", "lt": "less than {}", "le": "at most {}"}
USER_CODE = "module:name or path/to/file.py:name"
"""The form of user code instead of a built-in name."""
NOUNS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}


@dataclass(frozen=True)
class Key:
    """A dotted key."""

    name: str
    expected: str
    description: str
    section: type[Section] | None  # for keys of sections
    is_open: bool  # a mapping with any keys
    default: Any  # MISSING if the field has no default
    read_with: str = ""  # of a kind section: the KEY=VALUE that selects it

    @property
    def takes_text(self) -> bool:
        """Whether the value on the command line is literal text."""
        is_name = self.expected.startswith("one of") and self.expected.endswith(USER_CODE)
        return is_name or self.expected.startswith(("text", "a path"))


def walk(section: type[Section], prefix: str) -> Iterator[Key]:
    """Yields the keys of `section` in the schema's order; the key of a section comes before the keys in it."""
    fields, read_with = defaults(section), kinds(section)
    for field_name, info in section.model_fields.items():
        name = f"{prefix}{field_name}"
        below, item = section_below(info.annotation)
        is_open = get_origin(info.annotation) is dict and below is None
        default = fields.get(field_name, MISSING)
        read = f"{prefix}{read_with[field_name]}={field_name}" if field_name in read_with else ""
        yield Key(name, _expectation(info), info.description or "", below, is_open, default, read)
        if below is not None and item.startswith(ENTRY):
            yield Key(
                f"{name}.{ENTRY}",
                _noun(below),
                f"One entry of `{name}`, under a name of its own.",
                None,
                False,
                MISSING,
            )
        if below is not None:
            yield from walk(below, f"{name}.{item}")


@cache
def known_keys() -> Mapping[str, Key]:
    """Dotted name -> key, for every key of a run's configuration, in the schema's order."""
    return {key.name: key for key in walk(RunConfig, "")}


def find(name: str) -> Key | None:
    """The schema's key for a dotted name. An index matches ITEM; any name matches ENTRY or a key in an open mapping."""
    parts = name.split(".")
    exact = next((key for key in known_keys().values() if _fits(key, parts)), None)
    if exact is not None:
        return exact
    heads = (parts[:end] for end in range(len(parts) - 1, 0, -1))
    return next((key for head in heads for key in known_keys().values() if key.is_open and _fits(key, head)), None)


def _fits(key: Key, parts: Sequence[str]) -> bool:
    pattern = key.name.split(".")
    return len(pattern) == len(parts) and all(
        wanted in (part, ENTRY) or (wanted == ITEM and part.isdecimal())
        for wanted, part in zip(pattern, parts, strict=True)
    )


@dataclass(frozen=True)
class Translation:
    """A key of ours and the equivalent keys of other trainers; see `other_trainers.yaml`."""

    ours: str
    theirs: Mapping[str, Sequence[str]]  # trainer -> keys
    note: str


TRAINERS = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "lightrft": "LightRFT", "flow_grpo": "flow_grpo"}
OTHER_TRAINERS = Path(__file__).with_name("other_trainers.yaml")


@cache
def translations() -> tuple[Translation, ...]:
    """All entries of `other_trainers.yaml`."""
    entries = yaml.safe_load(OTHER_TRAINERS.read_text(encoding="utf-8"))["keys"]
    return tuple(
        Translation(ours, {name: entry[name] for name in TRAINERS if name in entry}, entry.get("note", ""))
        for ours, entry in entries.items()
    )


@cache
def _homes() -> Mapping[str, str]:
    """Section of another trainer -> section of ours."""
    sections = yaml.safe_load(OTHER_TRAINERS.read_text(encoding="utf-8"))["sections"]
    return {theirs: ours for ours, names in sections.items() for theirs in names}


def translated(name: str) -> tuple[Translation, str] | None:
    """Translates another trainer's key `name`; returns our key and the trainer, or None.

    `name` may lack leading sections (`rollout.n` for verl's `actor_rollout_ref.rollout.n`). If it starts with a section
    of ours (`learner.lr`), only keys of this section are considered.
    """
    section, _, last = name.rpartition(".")
    is_ours = name.partition(".")[0] in known_keys()
    wanted = last if is_ours else name
    candidates = [
        (theirs != name, translation.ours.count("."), translation, trainer)
        for translation in translations()
        if not is_ours or translation.ours.startswith(f"{section}.")
        for trainer, names in translation.theirs.items()
        for theirs in names
        if f".{theirs}".endswith(f".{wanted}") or ("." in theirs and wanted.endswith(f".{theirs}"))
    ]
    return min(candidates, key=lambda entry: entry[:2])[2:] if candidates else None


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Suggests a known name for an unknown `name`.

    In this order: the shallowest name that ends in `name`; a similar key of the same section (or of the equivalent
    section of another trainer); a key with the same last part, of the most similar section; a similar name; a similar
    last part.
    """
    parent, _, last = name.rpartition(".")
    head, dot, rest = parent.partition(".")
    sections = (parent, f"{_homes().get(head, head)}{dot}{rest}")
    endings = [candidate for candidate in known if _flat(candidate).endswith(f".{_flat(name)}")]
    if endings:
        return min(endings, key=lambda candidate: (candidate.count("."), len(candidate)))
    siblings = {_last(candidate): candidate for candidate in known if candidate.rpartition(".")[0] in sections}
    same = [candidate for candidate in known if "." in name and _last(candidate) == last]
    if last not in siblings and same:
        return max(same, key=lambda candidate: SequenceMatcher(None, parent, candidate.rpartition(".")[0]).ratio())
    others = {_last(candidate): candidate for candidate in known}
    whole = {candidate: candidate for candidate in known if not name.startswith(f"{candidate}.")}
    for wanted, candidates, cutoff in ((last, siblings, 0.6), (name, whole, 0.8), (last, others, 0.8)):
        similar = get_close_matches(wanted, list(candidates), n=1, cutoff=cutoff)
        if similar:
            return candidates[similar[0]]
    return None


def _flat(name: str) -> str:
    return name.replace("_", ".")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _expectation(info: FieldInfo) -> str:
    """Describes a field's valid values, e.g. 'a number, at least 0'."""
    bounds = [
        template.format(getattr(constraint, bound))
        for constraint in info.metadata
        for bound, template in BOUNDS.items()
        if hasattr(constraint, bound)
    ]
    patterns = [f"matching {c.pattern}" for c in info.metadata if hasattr(c, "pattern") and c.pattern is not None]
    filled = ["not empty"] if NOT_EMPTY in info.metadata else []
    return ", ".join([_noun(info.annotation), *bounds, *patterns, *filled])


def _noun(annotation: Any) -> str:
    if annotation in NOUNS:
        return NOUNS[annotation]
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(member.value for member in annotation)
    if get_origin(annotation) in (Union, UnionType):
        return f"{_noun(get_args(annotation)[0])}, {USER_CODE}"
    if get_origin(annotation) is dict:
        return "a mapping"
    if get_origin(annotation) is tuple:
        return "a list, each item " + _noun(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a section with " + ", ".join(annotation.model_fields)
    raise AssertionError(f"no words for {annotation}: name the type in configs.keys.NOUNS")
