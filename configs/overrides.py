"""Command-line overrides, `GROUP=OPTION` and `KEY=VALUE`: parsing, checks, and application to a configuration.

For keys of text or paths the value is the literal text, without enclosing quotes; a leading `~/` is the home directory.
Other values follow Hydra's grammar: numbers, true and false, lists, mappings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as HydraOverride
from hydra.errors import HydraException

from mobula.configs import keys
from mobula.configs.errors import ConfigError
from mobula.configs.groups import EXPERIMENT, groups, leaves, merge, own_values
from mobula.configs.schema.base import unread
from mobula.configs.schema.run import RunConfig


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
    """Parses overrides.

    Raises:
        ConfigError: an override cannot be parsed, has an unknown key or option, or contradicts another override.
    """
    overrides: dict[str, Override] = {}
    for text in texts:
        override = _read(text)
        other = overrides.setdefault(override.name, override)
        if other is not override and other.value != override.value:
            raise ConfigError(f"{other.text} and {override.text} contradict each other: give one of them")
    return list(overrides.values())


def apply_overrides(values: dict[str, Any], overrides: Iterable[Override]) -> None:
    """Sets the keys of `overrides` in `values`; groups are ignored.

    Raises:
        ConfigError: a key cannot be set in `values`.
    """
    # Sections first: a key of a section is applied on top of the section.
    for override in sorted((o for o in overrides if not o.is_group), key=lambda o: o.name.count(".")):
        try:
            _set(values, override.name.split("."), override.value)
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{override.text}: a value cannot be set there ({error}); `mobula show-config` shows what is there"
            ) from error


def refuse_unread(values: Mapping[str, Any], overrides: Sequence[Override]) -> None:
    """Refuses overrides of kind sections that are not selected in the result `values`: `sampler.vllm` without vLLM.

    Raises:
        ConfigError: names each such override and the key that selects the kind.
    """
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

    Raises:
        ConfigError: names an override without effect, and the overrides that overrule it.
    """
    for override in overrides:
        if override.is_group:
            settings = dict(leaves(own_values(override.name, override.value)))
        else:
            settings = dict(leaves(override.value, override.name))
        in_effect = [_has(values, name, value) for name, value in settings.items()]
        if any(in_effect) if override.is_group and settings else all(in_effect):
            continue
        others = [other.text for other in overrides if other is not override and _overlaps(other, settings)]
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


def _set(values: Any, path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        values = _at(values, part)
    last = path[-1]
    if isinstance(values, list):
        values[int(last)] = value
    elif isinstance(values, dict):
        merge(values, {last: value})
    else:
        raise TypeError(f"{path[-2]} is {values!r}")


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
    key = None if name in groups() else keys.find(name)
    if key is not None and key.takes_text:
        return Override(text, name, _text(name, value))
    return _read_by_grammar(text)


def _text(name: str, value: str) -> str:
    """Parses the value of a key that takes text or a path."""
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
    if keys.find(name) is None:
        raise ConfigError(unknown(name, [*keys.known_keys(), "experiment"]))
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
    """Formats `text` as an override of the scalar key `name`, for error messages."""
    value = text.partition("=")[2]
    if name in groups():
        return f"{name} is one of {', '.join(groups()[name])}"
    key = keys.find(name)
    if key is None or (key.is_open and key.name.count(".") < name.count(".")):
        return f"quote the value, e.g. {name}=\"'{value}'\""
    if key.expected.startswith("a list") and not value.startswith("["):
        return f"write {name}=[{value}]"
    return f"{name} is {key.expected}"


def _chosen(group: str, value: Any, options: Sequence[str]) -> str:
    if value in options:
        return str(value)
    suggestion = keys.nearest(str(value), options)
    hint = f"did you mean {group}={suggestion}? " if suggestion else ""
    raise ConfigError(
        f"{group}={value} is unknown: {hint}{group} is one of {', '.join(options)}; "
        f"set a single key of it as {group}.KEY=VALUE"
    )


def unknown(name: str, known: Sequence[str]) -> str:
    """Message for an unknown key."""
    translation = keys.translated(name)
    if translation is not None:
        key, trainer = translation
        note = f" ({key.note})" if key.note else ""
        return f"{name} is a key of {keys.TRAINERS[trainer]}: set {key.ours}=VALUE{note}"
    suggestion = keys.nearest(name, known)
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
