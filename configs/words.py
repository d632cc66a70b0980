"""Command-line words: `GROUP=OPTION` and `KEY=VALUE`, read and checked one by one, and laid on a configuration.

The value of a key that takes text or a path is the word's text as it stands; quotes around all of it are removed, and
a leading `~/` is the home folder. Any other value is read by Hydra's grammar: numbers, true and false, lists, mappings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from mobula.configs import keys
from mobula.configs.errors import ConfigError
from mobula.configs.groups import EXPERIMENT, groups, leaves, merge, own_values
from mobula.configs.schema.base import unread
from mobula.configs.schema.run import RunConfig


@dataclass(frozen=True)
class Word:
    """One word of the command line: a group and the chosen option, or a key and its value."""

    text: str
    name: str
    value: Any

    @property
    def is_group(self) -> bool:
        return self.name in groups()


def read_words(texts: Sequence[str]) -> list[Word]:
    """Every word, its key or option known to exist.

    Raises:
        ConfigError: a word cannot be read, names something unknown, or contradicts another one.
    """
    words: dict[str, Word] = {}
    for text in texts:
        word = _read(text)
        other = words.setdefault(word.name, word)
        if other is not word and other.value != word.value:
            raise ConfigError(f"{other.text} and {word.text} contradict each other: give one of them")
    return list(words.values())


def lay_on(values: dict[str, Any], words: Iterable[Word]) -> None:
    """Set the keys among `words` in `values`, a section before what it holds.

    Raises:
        ConfigError: there is no such place.
    """
    for word in sorted((word for word in words if not word.is_group), key=lambda word: word.name.count(".")):
        try:
            _set(values, word.name.split("."), word.value)
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{word.text}: a value cannot be set there ({error}); `mobula show-config` shows what is there"
            ) from error


def refuse_unread(values: Mapping[str, Any], words: Sequence[Word]) -> None:
    """No word sets a key of another kind than `values`, the result, have: `sampler.vllm` is read with vLLM alone.

    Raises:
        ConfigError: names each such word and the key that chooses the kind.
    """
    lines = [
        f"{word.text} is not read with {key}={chosen}: leave it out, or set {key}={section.rpartition('.')[2]}"
        for section, key, chosen in unread(RunConfig, values)
        for word in words
        if not word.is_group
        if any(f"{name}.".startswith(f"{section}.") for name, _ in leaves(word.value, word.name))
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def refuse_overruled(values: Mapping[str, Any], words: Sequence[Word]) -> None:
    """Every word must stand in `values`, the result: a key with its value, a group with something that its option says.

    Raises:
        ConfigError: names a word that does not stand, and the words that overrule it.
    """
    for word in words:
        said = dict(leaves(own_values(word.name, word.value) if word.is_group else word.value, _start(word)))
        standing = [_stands(values, name, value) for name, value in said.items()]
        if any(standing) if word.is_group and said else all(standing):
            continue
        others = [other.text for other in words if other is not word and _overlaps(other, said)]
        raise ConfigError(
            f"{word.text} changes nothing, it is overruled by {' and '.join(others)}: leave out one or the other"
        )


def _start(word: Word) -> str:
    return "" if word.is_group else word.name


def _stands(values: Any, name: str, wanted: Any) -> bool:
    for part in name.split("."):
        if isinstance(values, list):
            values = values[int(part)]
        elif isinstance(values, Mapping) and part in values:
            values = values[part]
        else:
            return False
    return bool(values == wanted)


def _overlaps(other: Word, said: Iterable[str]) -> bool:
    if other.name == EXPERIMENT:
        return False  # every other word is stronger
    names = dict(leaves(own_values(other.name, other.value))) if other.is_group else [other.name]
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in names for b in said)


def _set(values: Any, way: Sequence[str], value: Any) -> None:
    for part in way[:-1]:
        values = _at(values, part)
    last = way[-1]
    if isinstance(values, list):
        values[int(last)] = value
    elif isinstance(values, dict):
        merge(values, {last: value})
    else:
        raise TypeError(f"{way[-2]} is {values!r}")


def _at(values: Any, part: str) -> Any:
    if isinstance(values, list):
        return values[int(part)]
    if isinstance(values, dict):
        return values.setdefault(part, {})
    raise TypeError(f"{part} is below {values!r}")


def _read(text: str) -> Word:
    start, equals, value = text.partition("=")
    name = start.lstrip("+")
    if not name or not equals:
        raise ConfigError(f"{text!r} is no override: write {start.lstrip('~+-') or 'KEY'}=VALUE")
    key = None if name in groups() else keys.find(name)
    if key is not None and key.takes_text:
        return Word(text, name, _text(name, value))
    return _read_by_grammar(text)


def _text(name: str, value: str) -> str:
    """The value of a key that takes text or a path."""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        try:
            quoted = OverridesParser.create().parse_override(f"{name}={value}").value()
        except HydraException:
            return value
        return quoted if isinstance(quoted, str) else value
    is_at_home = value == "~" or value.startswith("~/")
    return str(Path(value).expanduser()) if is_at_home else value


def _read_by_grammar(text: str) -> Word:
    override = _parsed(text)
    name = override.key_or_group
    if override.package is not None or override.is_delete():
        raise ConfigError(f"{text!r} is not understood: every key keeps its place, so write {name}=VALUE")
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} holds several values but a run takes one: {_one_value(name, text)}")
    if name in groups():
        return Word(text, name, _chosen(name, override.value(), groups()[name]))
    if keys.find(name) is None:
        raise ConfigError(unknown(name, [*keys.known_keys(), "experiment"]))
    return Word(text, name, override.value())


def _parsed(text: str) -> Override:
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
    """How to write what `text` says as the one value that `name` takes."""
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
    """A program's own `settings`, with `overrides` in the place of those that name the same key or group."""
    named = {text.partition("=")[0] for text in overrides}
    return [*(text for text in settings if text.partition("=")[0] not in named), *overrides]
