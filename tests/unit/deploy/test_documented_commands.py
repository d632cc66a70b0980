"""Every command of README.md and docs/ composes, and each of its words stands in the resulting configuration."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mobula.configs import overrides as keys
from mobula.configs.load import dump_config, load_config, load_resolved
from mobula.configs.overrides import Override, groups, leaves, own_values, read_overrides
from mobula.configs.schema import RunConfig
from mobula.configs.schema.base import unread

REPOSITORY = Path(__file__).parents[3]
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = [REPOSITORY / "README.md", *(page for page in DOCS if page.name != "CHANGELOG.md")]
COMPLETE = ("train", "evaluate")  # these need a model and data
OFFLINE = ("sft", "reward-model", "dpo")  # `mobula train` with an experiment
LOOKING = ("plan", "show-config", "doctor")
SHOWN_IN_DOCS = {  # a page shows how to write these files, on top of the others
    "resources=gpu_4": "resources=gpu_2",
}
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```|((?:^    .*\n)+)", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
COMMAND = re.compile(r"(?:^|-- )\s*(?:\.venv/bin/)?(mobula [a-z-]+.*|make train.*)$")
WORD = re.compile(r"[a-z_.0-9A-Z]+=\S+")


@dataclass(frozen=True)
class Command:
    """A command line as a page shows it; in running text a bare `mobula train` is only the command's name."""

    page: str
    text: str
    is_in_text: bool

    @property
    def tokens(self) -> list[str]:
        return shlex.split(self.text.rstrip("& "), comments=True)


def commands(page: Path) -> Iterator[Command]:
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.findall(text):
        for line in "".join(block).replace("\\\n", " ").splitlines():
            found = COMMAND.search(line)
            if found:
                yield Command(page.name, found.group(1), is_in_text=False)
    for span in SPAN.findall(BLOCK.sub("", text)):
        found = COMMAND.match(" ".join(span.split()))
        if found:
            yield Command(page.name, found.group(1), is_in_text=True)


COMMANDS = [command for page in PAGES for command in commands(page)]


def configuration(command: Command, folder: Path) -> tuple[list[str], Any] | None:
    """The configuration words of a command and what they make; None if it takes none or is only named."""
    program, verb, *rest = command.tokens
    if program == "make":
        assert verb in ("train", "train-pretrained")
        shown = subprocess.run(["make", "-n", *command.tokens[1:]], cwd=REPOSITORY, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        line = shown.stdout.replace("\\\n", " ").splitlines()[-1]
        _, verb, *rest = shlex.split(line)
    words = [SHOWN_IN_DOCS.get(word, word) for word in rest if WORD.fullmatch(word) or "=" in word and " " in word]
    if command.is_in_text and not words or any(word.startswith("reproduce=") for word in words):
        return None  # the configuration is that of a run
    if verb in COMPLETE:
        return words, load_config(words)
    if verb in OFFLINE:
        job = [] if any(word.startswith("experiment=") for word in words) else [f"experiment={verb.replace('-', '_')}"]
        return words, load_config([*job, *words])
    if verb in LOOKING:
        return words, load_config(words, is_complete=False)
    if verb == "replay":
        path = folder / "config.yaml"
        path.write_text(dump_config(load_config(["experiment=digits"])), encoding="utf-8")
        return words, load_resolved(path, words)
    return None


def missing(values: Any, words: list[Override]) -> list[str]:
    """What words set and the values do not hold, apart from other words of the same command and unread sections."""
    sections = tuple(f"{name}." for name, *_ in unread(RunConfig, values))
    chosen = [dict(leaves(own_values(word.name, word.value)) if word.is_group else leaves(word.value, word.name))
              for word in words]  # fmt: skip
    return [
        f"{word.text}: {name}"
        for word, own in zip(words, chosen, strict=True)
        for name, value in own.items()
        if not name.startswith(sections)
        and not holds(value_at(values, name), computed(value, values))
        and not any(word.is_group and name in other for other in chosen if other is not own)
        and not any(other.name.startswith(f"{name}.") for other in words)  # a part of a list is set
    ]


def holds(value: Any, own: Any) -> bool:
    """Whether a value is what a file says; mappings in lists have the defaults of the schema besides."""
    if isinstance(value, list) and isinstance(own, list):
        return len(value) == len(own) and all(map(holds, value, own))
    if isinstance(value, dict) and isinstance(own, dict):
        return all(key in value and holds(value[key], item) for key, item in own.items())
    return bool(value == own)


def computed(value: Any, values: Any) -> Any:
    """The value of a file's interpolation, such as `${times:...}`, in a configuration of `values`."""
    return OmegaConf.create({**values, "value": value}).value if "${" in str(value) else value


def value_at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[int(part)] if isinstance(values, list) else values[part]
    return values


def test_commands_are_found_in_every_form() -> None:
    assert {command.tokens[1] for command in COMMANDS} >= {"train", "replay", "plan", "score"}
    assert any(command.text.startswith("make train") and "ARGS" in command.text for command in COMMANDS)
    assert any(command.is_in_text for command in COMMANDS) and not all(command.is_in_text for command in COMMANDS)


@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_every_word_of_a_documented_command_stands_in_its_result(page: str, tmp_path: Path) -> None:
    for command in COMMANDS:
        if command.page == page and (made := configuration(command, tmp_path)) is not None:
            words, config = made
            assert missing(json.loads(config.model_dump_json()), read_overrides(words)) == [], command.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_word_in_the_text_names_a_key_or_an_option(page: Path) -> None:
    heads = {*groups(), *(name.partition(".")[0] for name in keys.known_keys())}
    spans = [span for span in SPAN.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))) if WORD.fullmatch(span)]
    words = [span for span in spans if re.split(r"[.=]", span)[0] in heads and not span.split("=")[1].isupper()]
    for word in words:
        read_overrides([SHOWN_IN_DOCS.get(word, word)])
