"""The special tokens of chat models, as they look in text: a scorer must not take those in a text for its own."""

from __future__ import annotations

import re

# Markers such as <|im_end|> stand anywhere; the shorter ones are also words of HTML, so they go at the ends alone.
_MARKERS = re.compile(
    r"<\|[^|<>\s]{1,64}\|>|<\uff5c[^\uff5c<>]{1,64}\uff5c>|<(?:start_of_turn|end_of_turn|image|IMG_CONTEXT)>"
)
_EDGES = re.compile(r"^(?:\s*<(?:/?s|bos|eos|pad|unk)>)+|(?:<(?:/?s|bos|eos|pad|unk)>\s*)+$")


def without_markers(text: str) -> str:
    """`text` without special tokens, and without the white space that padding leaves in front."""
    return _EDGES.sub("", _MARKERS.sub("", text)).lstrip()
