"""Suggests existing names for a missing path, for error messages."""

from __future__ import annotations

import re
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # `name` or `owner/name`
HUB_EXAMPLE = "HuggingFaceTB/SmolLM2-135M-Instruct"
NUM_NAMED = 3
MAX_LISTED = 2000  # entries of one folder that are compared


def near(path: Path) -> str:
    """The first missing part of a path and similar names in its directory, in brackets; "" if the path exists.

    Example:
        >>> near(Path("data/modles/smollm"))
        ' (data has no modles; near: data/models)'
    """
    if path.exists():
        return ""
    missing = next(part for part in (*reversed(path.parents), path) if not part.exists())
    folder = missing.parent
    if not folder.is_dir():
        return f" ({folder} is a file)"
    try:
        names = {entry.name.casefold(): entry for entry in islice(folder.iterdir(), MAX_LISTED)}
    except OSError as error:
        return f" ({folder} cannot be read: {error.strerror})"
    alike = get_close_matches(missing.name.casefold(), list(names), n=NUM_NAMED, cutoff=0.6)
    suggestions = f"; near: {', '.join(str(names[name]) for name in alike)}" if alike else ""
    return f" ({folder.absolute() if folder == Path() else folder} has no {missing.name}{suggestions})"


def may_be_hub_name(name: str) -> bool:
    """Whether a text has the form of a name on the hub."""
    return HUB_NAME.fullmatch(name) is not None
