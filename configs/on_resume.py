"""Reads `on_resume.yaml`: for every configuration key, or its section, whether a resumed run may change it.

The longest declared prefix of a key counts, so a key may differ from its section.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import yaml


class OnResume(StrEnum):
    """Effect of another value on a resume."""

    REFUSED = "refused"  # the checkpoint's state or the order of rows depends on the key
    NAMED = "named"  # training changes from this step on: logged
    FREE = "free"  # affects placement, speed or output only


_FILE = Path(__file__).with_suffix(".yaml")
DECLARED: Mapping[OnResume, tuple[str, ...]] = {
    OnResume(kind): tuple(names) for kind, names in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
}
BY_NAME: Mapping[str, OnResume] = {name: kind for kind, names in DECLARED.items() for name in names}


def on_resume(key: str) -> OnResume | None:
    """The effect of another value of a dotted key; None if neither the key nor a section of it is declared."""
    parts = key.split(".")
    heads = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((BY_NAME[head] for head in heads if head in BY_NAME), None)
