"""Words of the command line: groups and overrides, with the nearest names in errors."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from enum import Enum
from functools import cache, reduce
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as HydraOverride
from hydra.errors import HydraException
from pydantic.fields import FieldInfo

from mobula.configs.errors import ConfigError
from mobula.configs.schema.base import ENTRY, ITEM, NOT_EMPTY, Section, defaults, kinds, section_below, unread
from mobula.configs.schema.run import RunConfig

# The YAML groups, their options, and the values that an option sets.
#
# An option's file may include other options of the group (`defaults: [held_out, _self_]`). An option sets the values in
# its file and in the included options.
#
# Options are searched in this directory, the directories of `MOBULA_TASKS` and of `examples/`, in this order.

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parent / "examples"  # inside the package `mobula`, also in a wheel
TASKS_VARIABLE = "MOBULA_TASKS"
"""Environment variable: the user's directories with groups (such as `examples/sums`), separated by colons."""


MISSING = "???"  # a value that the user must set
EXPERIMENT = "experiment"
SMALL_EXAMPLE = "digits"
"""The experiment of `examples/` for checks of a machine: needs neither a GPU nor files."""


GLOBAL_PACKAGE = "# @package _global_"

# Keys that values are computed from in group files, and their types.
COMPUTED_FROM = {
    "resources.num_nodes": int,
    "resources.device": str,
    "policy.lora.rank": int,
    "sampler.max_tokens": int,
}

COMPUTATIONS: Mapping[str, Callable[..., Any]] = {  # `${NAME:${KEY},...}` in files
    "times": lambda a, b: a * b,
    "if_positive": lambda number, yes, no: yes if number > 0 else no,
    "if_gpu": lambda device, yes, no: yes if device != "cpu" else no,
}


@cache
def roots() -> tuple[Path, ...]:
    """The directories with groups. The first directory with an option's file decides."""
    tasks = [Path(name).resolve() for name in os.environ.get(TASKS_VARIABLE, "").split(":") if name]
    for task in tasks:
        if not task.is_dir():
            raise ConfigError(f"{TASKS_VARIABLE} names {task}, which is no directory: correct or unset it")
        for file in task.glob("*/*.yaml"):
            if (FOLDER / file.relative_to(task)).is_file():
                raise ConfigError(f"{file} has the name of a built-in option of {file.parent.name}: rename it")
    return (FOLDER, *tasks, *sorted(folder for folder in EXAMPLES.iterdir() if folder.is_dir()))


@cache
def groups() -> Mapping[str, tuple[str, ...]]:
    """Group -> options."""
    names = sorted(folder.name for folder in FOLDER.iterdir() if any(folder.glob("*.yaml")))
    files = {name: {file.stem for root in roots() for file in (root / name).glob("*.yaml")} for name in names}
    return {name: tuple(sorted(stems)) for name, stems in files.items()}


def option_file(group: str, option: str) -> Path:
    return next(file for root in roots() if (file := root / group / f"{option}.yaml").is_file())


def layers() -> tuple[str, ...]:
    """The groups in the order of `config.yaml`, from weak to strong; the experiment is last."""
    entries = yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return tuple(group for entry in entries if isinstance(entry, dict) for group in entry)


def own_values(group: str, option: str) -> dict[str, Any]:
    """The values that an option sets in a run's configuration, without values that the user must set."""
    text = option_file(group, option).read_text(encoding="utf-8")
    content = yaml.safe_load(text) or {}
    values: dict[str, Any] = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            merge(values, own_values(group, entry.partition("@")[0]))
    settings = without_missing(content)
    return merge(values, settings if text.startswith(GLOBAL_PACKAGE) else {group: settings})


def merge(values: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Merges `others` into `values` recursively, and returns `values`. An empty mapping replaces a value."""
    for key, other in others.items():
        if isinstance(other, Mapping) and other and isinstance(values.get(key), dict):
            merge(values[key], other)
        else:
            values[key] = merge({}, other) if isinstance(other, Mapping) else other
    return values


def leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted name and value of the leaves of nested mappings; an empty mapping is a leaf."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, values


def without_missing(values: Any) -> Any:
    """`values` without keys that the user must set."""
    if isinstance(values, Mapping):
        return {key: without_missing(value) for key, value in values.items() if value != MISSING}
    if isinstance(values, list):
        return [without_missing(value) for value in values]
    return values


BOUNDS = {"gt": "more than {}", "ge": "at least {}", "lt": "less than {}", "le": "at most {}"}
USER_CODE = "module:name or path/to/file.py:name"
"""The form of user code instead of a built-in name."""
ONE_OF = "one of "
OWN_CODE = re.compile(r"[^:\s=]+(\.py|:[A-Za-z_][\w.]*)")  # a name in a file or module, or a file alone
FUNCTION = re.compile(r"rewards\.components\.\d+\.function")
REWARDS = ("function", "reward_function", "reward_fn", "reward_func", "reward_funcs")  # what others call one's own
NUM_SHOWN, ALL = 3, "?"  # names that are shown, and a value that asks for all


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
    def takes_code(self) -> bool:
        """Whether the value may be user code."""
        return self.expected.endswith(USER_CODE) or self.name == "environment.name"

    def expected_near(self, value: str) -> str:
        """`expected` with the choices that are nearest to `value`, if there are many."""
        if not self.expected.startswith(ONE_OF):
            return self.expected
        names, own, _ = self.expected.removeprefix(ONE_OF).partition(f", {USER_CODE}")
        return f"{ONE_OF}{few(value, names.split(', '))}{own}"

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
        chosen_by = " or ".join([field_name, *section.shared_kinds.get(field_name, ())])
        read = f"{prefix}{read_with[field_name]}={chosen_by}" if field_name in read_with else ""
        yield Key(name, _expectation(info), info.description or "", below, is_open, default, read)
        if below is not None and item.startswith(ENTRY):
            description = f"One entry of `{name}`, under a name of your choice."
            yield Key(f"{name}.{ENTRY}", _noun(below), description, None, False, MISSING)
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
    entries = yaml.safe_load(OTHER_TRAINERS.read_text(encoding="utf-8"))["keys"]
    return tuple(
        Translation(ours, {name: entry[name] for name in TRAINERS if name in entry}, entry.get("note", ""))
        for ours, entry in entries.items()
    )


@cache
def _homes() -> Mapping[str, str]:
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
        return ONE_OF + ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ONE_OF + ", ".join(member.value for member in annotation)
    if get_origin(annotation) in (Union, UnionType):
        return f"{_noun(get_args(annotation)[0])}, {USER_CODE}"
    if get_origin(annotation) is dict:
        return "a mapping"
    if get_origin(annotation) is tuple:
        return "a list, each item " + _noun(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a section with " + ", ".join(annotation.model_fields)
    raise AssertionError(f"no words for {annotation}: name the type in configs.keys.NOUNS")


# Command-line overrides, `GROUP=OPTION` and `KEY=VALUE`: parsing, checks, and application to a configuration.
#
# For keys of text or paths the value is the literal text, without enclosing quotes; a leading `~/` is the home
# directory.
# Other values follow Hydra's grammar: numbers, true and false, lists, mappings.


@dataclass(frozen=True)
class Override:
    """A group and the chosen option, or a key and its value."""

    text: str
    name: str
    value: Any

    @property
    def is_group(self) -> bool:
        return self.name in groups()


def read_overrides(texts: Sequence[str]) -> list[Override]:
    overrides: dict[str, Override] = {}
    for text, spelled in ((word, spelled) for word in texts for spelled in _spelled(word)):
        override = replace(_read(spelled), text=text)
        other = overrides.setdefault(override.name, override)
        if other is not override and other.value != override.value:
            raise ConfigError(f"{other.text} and {override.text} contradict each other: give one of them")
    return list(overrides.values())


def _spelled(text: str) -> list[str]:
    """The words that a word stands for: `rewards=reward.py:closeness` and `data=reader.py:rows` are short forms."""
    group, _, value = text.partition("=")
    if group not in groups() or value in groups()[group] or not OWN_CODE.fullmatch(value):
        return [text]
    if not (name := value.rpartition(":")[2]) or value.endswith(".py"):
        raise ConfigError(f"{text} {without_name(value)}")
    if group == "rewards":
        part = f"{group}.components.0"
        return [f"{group}=own", f"{part}.function={value}", f"{part}.name={name}", f"{group}.accuracy_component={name}"]
    keys = [key.name for key in known_keys().values() if key.name.startswith(f"{group}.") and key.takes_code]
    keys.sort(key=lambda key: key.count("."))
    if f"{group}.kind" in keys or f"{group}.name" in keys:
        return [f"{group}.{'kind' if f'{group}.kind' in keys else 'name'}={value}"]
    raise ConfigError(
        f"{text}: your own code is the value of one key: "
        + (f"write {' or '.join(f'{key}={value}' for key in keys[:NUM_SHOWN])}" if keys else f"{group} has no such key")
    )


def without_name(file: str) -> str:
    """Says that a file of user code is given without a name in it, and which it has."""
    try:
        nodes = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        nodes = []
    there = [n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    names = f"; it has {', '.join(there[:NUM_SHOWN])}" if there else ""
    return f"names a file and nothing in it: write {file}:{there[0] if there else 'NAME'}{names}"


def few(value: str, names: Sequence[str]) -> str:
    """The names that are nearest to `value`, and how many there are."""
    if len(names) <= 2 * NUM_SHOWN or value == ALL:
        return ", ".join(names)
    shown = get_close_matches(value, names, n=NUM_SHOWN, cutoff=0.3) or names[:NUM_SHOWN]
    return f"{', '.join(shown)} or one of {len(names) - len(shown)} others"


def apply_overrides(values: dict[str, Any], overrides: Iterable[Override]) -> None:
    """Sets the keys of `overrides` in `values`; groups are ignored. A replaced function of a reward loses the options
    of the one before it."""
    # Sections first: a key of a section is applied on top of the section, as options are on top of their function.
    for override in sorted((o for o in overrides if not o.is_group), key=_depth):
        *path, last = override.name.split(".")
        try:
            part = reduce(_at, path, values)
            if FUNCTION.fullmatch(override.name) and part.get("function") != override.value:
                part["options"] = {}
            _set(part, last, override.value)
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{override.text}: a value cannot be set there ({error}); `mobula show-config` shows what is there"
            ) from error


def refuse_unread(values: Mapping[str, Any], overrides: Sequence[Override]) -> None:
    """Refuses overrides of kind sections that are not selected in the result `values`: `sampler.vllm` without vLLM."""
    lines = [
        f"{override.text} is not read with {key}={chosen}: leave it out, or set {key}={section.rpartition('.')[2]}"
        for section, key, chosen in unread(RunConfig, values)
        for override in overrides
        if not override.is_group
        if any(f"{name}.".startswith(f"{section}.") for name, _ in leaves(override.value, override.name))
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def refuse_overruled(values: Mapping[str, Any], overrides: Sequence[Override]) -> None:
    """Refuses overrides without effect on the result `values`: a key with another value, or a group whose option has no
    value in the result.
    """
    for override in overrides:
        if override.is_group:
            settings = dict(leaves(own_values(override.name, override.value)))
        else:
            settings = dict(leaves(override.value, override.name))
        in_effect = [_has(values, name, value) for name, value in settings.items()]
        if any(in_effect) if override.is_group and settings else all(in_effect):
            continue
        if override.is_group and override.text != f"{override.name}={override.value}":
            continue  # the group of a short form, whose other words replace its settings
        others = [o.text for o in overrides if o is not override and _overlaps(o, settings)]
        raise ConfigError(
            f"{override.text} changes nothing, it is overruled by {' and '.join(others)}: leave out one or the other"
        )


def _has(values: Any, name: str, wanted: Any) -> bool:
    for part in name.split("."):
        if isinstance(values, list):
            values = values[int(part)]
        elif isinstance(values, Mapping) and part in values:
            values = values[part]
        else:
            return False
    return bool(values == wanted)


def _overlaps(other: Override, settings: Iterable[str]) -> bool:
    if other.name == EXPERIMENT:
        return False  # every other override is stronger
    names = dict(leaves(own_values(other.name, other.value))) if other.is_group else [other.name]
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in names for b in settings)


def _depth(override: Override) -> tuple[int, bool]:
    return override.name.count("."), not FUNCTION.fullmatch(override.name)


def _set(part: Any, last: str, value: Any) -> None:
    if isinstance(part, list):
        part[int(last)] = value
    elif isinstance(part, dict):
        merge(part, {last: value})
    else:
        raise TypeError(f"{last} is below {part!r}")


def _at(values: Any, part: str) -> Any:
    if isinstance(values, list):
        return values[int(part)]
    if isinstance(values, dict):
        return values.setdefault(part, {})
    raise TypeError(f"{part} is below {values!r}")


def _read(text: str) -> Override:
    start, equals, value = text.partition("=")
    name = start.lstrip("+")
    if not name or not equals:
        raise ConfigError(f"{text!r} is no override: write {start.lstrip('~+-') or 'KEY'}=VALUE")
    key = None if name in groups() else find(name)
    if key is not None and key.takes_text:
        return Override(text, name, _text(name, value))
    return _read_by_grammar(text)


def _text(name: str, value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        try:
            quoted = OverridesParser.create().parse_override(f"{name}={value}").value()
        except HydraException:
            return value
        return quoted if isinstance(quoted, str) else value
    is_at_home = value == "~" or value.startswith("~/")
    return str(Path(value).expanduser()) if is_at_home else value


def _read_by_grammar(text: str) -> Override:
    override = _parsed(text)
    name = override.key_or_group
    if override.package is not None or override.is_delete():
        raise ConfigError(f"{text!r} is not understood: every key keeps its place, so write {name}=VALUE")
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} holds several values but a run takes one: {_one_value(name, text)}")
    if name in groups():
        return Override(text, name, _chosen(name, override.value(), groups()[name]))
    if find(name) is None:
        raise ConfigError(unknown(name, [*known_keys(), "experiment"]))
    return Override(text, name, override.value())


def _parsed(text: str) -> HydraOverride:
    name, _, value = text.partition("=")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        bare = name.lstrip("~+-")
        if bare.strip(" .") != bare:
            hint = f"write {bare.strip(' .') or 'KEY'}={value.strip()}"
        else:
            hint = _one_value(bare, text)
        raise ConfigError(f"{text!r} is no override that can be read: {hint}") from error


def _one_value(name: str, text: str) -> str:
    value = text.partition("=")[2]
    if name in groups():
        return f"{name} is one of {few(value, groups()[name])}"
    key = find(name)
    if key is None or (key.is_open and key.name.count(".") < name.count(".")):
        return f"quote the value, e.g. {name}=\"'{value}'\""
    if key.expected.startswith("a list") and not value.startswith("["):
        return f"write {name}=[{value}]"
    return f"{name} is {key.expected}"


def _chosen(group: str, value: Any, options: Sequence[str]) -> str:
    if value in options:
        return str(value)
    own = f"; your own function is {group}=FILE.py:NAME" if group == "rewards" else ""
    listed = "" if len(options) <= 2 * NUM_SHOWN or value == ALL else f" ({group}={ALL} lists them)"
    raise ConfigError(
        f"{group}={value} is unknown: {group} is {few(str(value), options)}{listed}{own}; "
        f"set a single key of it as {group}.KEY=VALUE"
    )


def unknown(name: str, known: Sequence[str]) -> str:
    """Message for an unknown key."""
    if name in REWARDS:
        return f"{name} is unknown: did you mean rewards=FILE.py:NAME?"
    if f"num_{name}" in known:
        return f"{name} is unknown: did you mean num_{name}?"
    if near := get_close_matches(name, groups(), n=1, cutoff=0.85):
        return f"{name} is unknown: did you mean {near[0]}=OPTION, or a key {near[0]}.KEY=VALUE?"
    translation = translated(name)
    if translation is not None:
        key, trainer = translation
        note = f" ({key.note})" if key.note else ""
        return f"{name} is a key of {TRAINERS[trainer]}: set {key.ours}=VALUE{note}"
    suggestion = nearest(name, known)
    if suggestion:
        return f"{name} is unknown: did you mean {suggestion}?"
    section = name.rpartition(".")[0]
    below = [candidate.rpartition(".")[2] for candidate in known if candidate.rpartition(".")[0] == section]
    if not below:
        return f"{name} is unknown: `mobula show-config` lists every key"
    return f"{name} is unknown: {section or 'a run'} has {', '.join(below)}"


def overridden(settings: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Merges `overrides` into a program's `settings`: an override replaces the setting of the same key or group."""
    named = {text.partition("=")[0] for text in overrides}
    return [*(text for text in settings if text.partition("=")[0] not in named), *overrides]
