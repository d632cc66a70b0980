"""Hints in error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that is most like an unknown one, in brackets; empty if none is like it."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def own_name(target: str) -> str:
    """What to do where the module of `module:function` has the name of a package of ours; empty for another module."""
    package = target.partition(":")[0].partition(".")[0]
    if package not in ("actors", "cluster", "configs", "deploy", "learner", "rewards"):
        return ""
    return f"`{package}` is a package of mobula, which comes first: name your file as path/to/{package}.py:function"
