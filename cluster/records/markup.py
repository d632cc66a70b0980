"""Marks media placeholders in texts, and escapes text that looks like a placeholder or a special token.

While a row is made into a prompt, `<image>`, `<video>` and `<audio>` mark the positions of media. A `BREAK` inside a
placeholder escapes it as text. U+FDD0 to U+FDD3 are noncharacters, which interchanged text does not contain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PLACEHOLDERS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
BREAK = "\ufdd0"
PART = "\ufdd1"  # after a placeholder that comes from a media part of a message
SOFT = "\ufdd3"  # inside a placeholder of a text part: it is text unless the row has a medium for it
_ANY = re.compile("|".join(PLACEHOLDERS.values()))
_MARKED_ANSWER = re.compile(r"(?:\A|\n)[ \t]*####[ \t]*(\S[^\n]*?)\s*\Z")


def plain(text: str) -> str:
    """Returns the text for display, without the marks of this module."""
    return text.replace(BREAK, "").replace(PART, "").replace(SOFT, "")


def marked_answer(text: str) -> tuple[str, str]:
    """Splits a worked answer whose last line is `#### ANSWER`, as in gsm8k, into the text before and the answer; any
    other text is an answer without a text before it."""
    found = _MARKED_ANSWER.search(text)
    return (text[: found.start()], found[1]) if found else ("", text)


def literal(text: str, kinds: Sequence[str] = tuple(PLACEHOLDERS)) -> str:
    """Escapes the placeholders of `kinds` as text."""
    for placeholder in map(PLACEHOLDERS.__getitem__, kinds):
        text = text.replace(placeholder, _broken(placeholder))
    return text


def text_part(text: str) -> str:
    """Marks the placeholders in a text part of a message with `SOFT`."""
    for placeholder in PLACEHOLDERS.values():
        text = text.replace(placeholder, placeholder[0] + SOFT + placeholder[1:])
    return text


def parts_of(text: str) -> list[dict[str, str]]:
    """Splits the text of a row into parts of a message."""
    kinds = {placeholder: {"type": kind} for kind, placeholder in PLACEHOLDERS.items()}
    pieces = [piece for piece in re.split(f"({_ANY.pattern})", text) if piece]
    return [kinds.get(piece, {"type": "text", "text": plain(piece)}) for piece in pieces]


def verbatim(text: str) -> str:
    """Marks a text whose special tokens are plain text. Unbroken placeholders still mark media."""
    return BREAK + text


def is_verbatim(text: str) -> bool:
    return text.startswith(BREAK)


def without_special(text: str, special: re.Pattern[str]) -> str:
    """Inserts a `BREAK` after the first character of every match of `special`; keeps placeholders of media."""
    pieces, done = list[str](), 0
    for found in [*_ANY.finditer(text), None]:
        pieces.append(_without_matches(text[done : found.start() if found else len(text)], special))
        if found:
            pieces.append(found.group())
            done = found.end()
    return "".join(pieces)


def placed(texts: Sequence[str], kind: str, own: str, num_media: int) -> list[str]:
    """Returns `texts` with placeholders of `kind` at the media of the row; other placeholders become text.

    If a part of a message names a medium of this kind, only such parts are placeholders. Otherwise each `own` is one
    (the configured placeholder; empty: none). Placeholders in text parts count unless the others are `num_media`.
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


def needed_breaks(text: str, special: re.Pattern[str]) -> str:
    """Returns `text` with the breaks inside special tokens alone; the tokenizer then reads these as text."""
    pieces = text.split(BREAK)
    inside = {n for found in special.finditer("".join(pieces)) for n in range(found.start() + 1, found.end())}
    found, end = [pieces[0]], len(pieces[0])
    for piece in pieces[1:]:
        found += [BREAK * (end in inside), piece]
        end += len(piece)
    return "".join(found)


def _broken(token: str) -> str:
    return token[0] + BREAK + token[1:]


def _without_matches(text: str, special: re.Pattern[str]) -> str:
    pieces, done = list[str](), 0
    while found := special.search(text, done):
        pieces.append(text[done : found.start() + 1] + BREAK)
        done = found.start() + 1
    return "".join([*pieces, text[done:]])
