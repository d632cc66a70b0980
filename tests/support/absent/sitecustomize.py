"""Hides packages from Python processes with this folder in PYTHONPATH, as if they were not installed.

The environment variable ABSENT_PACKAGES names them, separated by commas; child processes inherit it.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

ABSENT = frozenset(filter(None, os.environ.get("ABSENT_PACKAGES", "").split(",")))


class FinderOfPresent:
    """`PathFinder` without the absent packages."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in ABSENT:
            return None
        return PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*args: Any, **kwargs: Any) -> Any:
        return PathFinder.find_distributions(*args, **kwargs)

    @staticmethod
    def invalidate_caches() -> None:
        PathFinder.invalidate_caches()


sys.meta_path[:] = [FinderOfPresent if finder is PathFinder else finder for finder in sys.meta_path]
