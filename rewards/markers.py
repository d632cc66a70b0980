"""Removes the special tokens of chat models from texts, so that a scorer does not interpret them."""

from __future__ import annotations

import re

# Markers such as <|im_end|> are removed anywhere; shorter ones may be HTML tags and are removed at the ends only.
_MARKERS = re.compile(
    r"<\|[^|<>\s]{1,64}\|>|<\uff5c[^\uff5c<>]{1,64}\uff5c>|<(?:start_of_turn|end_of_turn|image|IMG_CONTEXT)>"
)
_EDGES = re.compile(r"^(?:\s*<(?:/?s|bos|eos|pad|unk)>)+|(?:<(?:/?s|bos|eos|pad|unk)>\s*)+$")


def without_markers(text: str) -> str:
    """Returns `text` without special tokens, and without leading white space from padding."""
    return _EDGES.sub("", _MARKERS.sub("", text)).lstrip()
