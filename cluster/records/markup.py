"""Placeholders of media in texts, and how text that happens to look like one, or like a special token, stays text.

Between a row and its prompt a text holds `<image>`, `<video>` and `<audio>` where media stand. A `BREAK` inside of one
says that it is text. U+FDD0 to U+FDD3 are noncharacters: no text that is interchanged holds them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PLACEHOLDERS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
BREAK = "\ufdd0"
PART = "\ufdd1"  # behind a placeholder: a part of a message has said that a medium stands here
SOFT = "\ufdd3"  # inside of a placeholder: it stands in a text part, and is text unless the row has a medium for it
_ANY = re.compile("|".join(PLACEHOLDERS.values()))


def plain(text: str) -> str:
    """The text to be shown, without the marks of this module."""
    return text.replace(BREAK, "").replace(PART, "").replace(SOFT, "")


def literal(text: str, kinds: Sequence[str] = tuple(PLACEHOLDERS)) -> str:
    """`text`, in which placeholders of `kinds` are text."""
    for placeholder in map(PLACEHOLDERS.__getitem__, kinds):
        text = text.replace(placeholder, _broken(placeholder))
    return text


def text_part(text: str) -> str:
    """The text of a text part of a message."""
    for placeholder in PLACEHOLDERS.values():
        text = text.replace(placeholder, placeholder[0] + SOFT + placeholder[1:])
    return text


def parts_of(text: str) -> list[dict[str, str]]:
    """The text of a row as parts of a message."""
    kinds = {placeholder: {"type": kind} for kind, placeholder in PLACEHOLDERS.items()}
    pieces = [piece for piece in re.split(f"({_ANY.pattern})", text) if piece]
    return [kinds.get(piece, {"type": "text", "text": plain(piece)}) for piece in pieces]


def verbatim(text: str) -> str:
    """A text whose special tokens are text as well; of its placeholders, those stand for media that are not broken."""
    return BREAK + text


def is_verbatim(text: str) -> bool:
    return text.startswith(BREAK)


def without_special(text: str, special: re.Pattern[str]) -> str:
    """`text`, in which every match of `special` is broken behind its first character; placeholders of media stay."""
    pieces, done = list[str](), 0
    for found in [*_ANY.finditer(text), None]:
        pieces.append(_without_matches(text[done : found.start() if found else len(text)], special))
        if found:
            pieces.append(found.group())
            done = found.end()
    return "".join(pieces)


def placed(texts: Sequence[str], kind: str, own: str, num_media: int) -> list[str]:
    """`texts` with the placeholder of `kind` where the row has one, and nowhere else.

    If a part of a message names a medium of this kind, placeholders are parts alone. Else they are `own` in the texts,
    what the configuration calls them; empty for none. Those in text parts count where the row has `num_media` media.
    """
    placeholder = PLACEHOLDERS[kind]
    soft = placeholder[0] + SOFT + placeholder[1:]
    found = _placed([text.replace(soft, _broken(placeholder)) for text in texts], kind, own)
    if sum(text.count(placeholder) for text in found) == num_media or not any(soft in text for text in texts):
        return found
    return _placed([text.replace(soft, placeholder) for text in texts], kind, own)


def _placed(texts: Sequence[str], kind: str, own: str) -> list[str]:
    placeholder = PLACEHOLDERS[kind]
    mark = placeholder + PART if any(placeholder + PART in text for text in texts) else own
    if not mark:
        return [literal(text, (kind,)) for text in texts]
    return [placeholder.join(literal(piece, (kind,)) for piece in text.split(mark)) for text in texts]


def cut_at_breaks(text: str, special: re.Pattern[str]) -> list[str]:
    """The pieces of `text` that are tokenised one by one: it is cut at breaks within what would be a special token."""
    pieces = text.split(BREAK)
    whole = "".join(pieces)
    inside = {place for found in special.finditer(whole) for place in range(found.start() + 1, found.end())}
    found, end = [pieces[0]], len(pieces[0])
    for piece in pieces[1:]:
        if end in inside:
            found.append(piece)
        else:
            found[-1] += piece
        end += len(piece)
    return found


def _broken(token: str) -> str:
    return token[0] + BREAK + token[1:]


def _without_matches(text: str, special: re.Pattern[str]) -> str:
    pieces, done = list[str](), 0
    while found := special.search(text, done):
        pieces.append(text[done : found.start() + 1] + BREAK)
        done = found.start() + 1
    return "".join([*pieces, text[done:]])
