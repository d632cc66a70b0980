r"""Removes LaTeX styles (`\boldsymbol`, `\large`, `\color`) and expands short forms."""

from __future__ import annotations

import re

_SPACE = r"(?:\s|\\[,;:! ]|~|\\q?quad(?![A-Za-z]))"
_STYLE = re.compile(
    r"\\(?:display|text|script)style(?![A-Za-z])|\\(?:large|Large|LARGE|huge|Huge|small|normalsize|footnotesize|tiny)"
    r"(?![A-Za-z])|\\(?:text)?color\s*\{[^{}]*\}|\\(?:left|right)\.|\\text\s*\{\s*\.?\s*\}"
)
_PRIME = re.compile(r"\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![A-Za-z]))")
_SHAPE = re.compile(
    r"\\(?:boldsymbol|bm|underline|mathit|mathsf|mathtt|textit|textsf|texttt|textrm|emph|fbox)(?![A-Za-z])\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_EDGES = re.compile(rf"^(?:{_SPACE}|\\\\|&|=)+|(?:{_SPACE}|\\\\|&|(?<=[0-9}}]),)+$")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])(?![0-9])")
_SHORT_NUMERATOR = re.compile(r"\\frac\s*([0-9A-Za-z])\s*(?=\{)")
_HALF_SHORT_FRACTION = re.compile(r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z])(?![0-9A-Za-z])")
_POWER = re.compile(r"\^\s*(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})")
_SPACED_THOUSANDS = re.compile(r"([+-]?[0-9]{1,3})((?:(?: |\\[,! ]|~|')[0-9]{3})+)(\.[0-9]+)?")
_PLAIN_TIMES = re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)")
_MODULUS = re.compile(
    r"\\pmod\s*(?:\{\s*(\w+)\s*\}|(\w+))|\(\s*(?:\\(?:text|mathrm)\s*\{\s*mod\s*\}|\\b?mod(?![A-Za-z])|mod)\s*(\w+)\s*\)"
)
_HALF_DAY = re.compile(
    r"([0-9]{1,2}(?::[0-9]{2})?)(?:\s|\\[,;: ]|~)*(?:\\text\s*\{\s*)?([AaPp])(?:\.\s?[Mm]\.|[Mm]\.?)\s*\}?"
)


def plain_typesetting(text: str) -> str:
    """Removes styles, colours and sizes, and expands fractions, moduli, thousands and times of day."""
    if "\\" in text:
        text = _PRIME.sub("'", _STYLE.sub("", text))
        whole = _SHAPE.fullmatch(text.strip())
        text = whole[1] if whole else _SHAPE.sub(r"{\1}", text)
        text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
        text = _SHORT_NUMERATOR.sub(r"\\frac{\1}", text)
        text = _POWER.sub(r"^{\1}", _HALF_SHORT_FRACTION.sub(r"\1{\2}", text))
    text = _EDGES.sub("", text)
    if thousands := _SPACED_THOUSANDS.fullmatch(text):
        text = thousands[1] + re.sub(r"[^0-9]", "", thousands[2]) + (thousands[3] or "")
    if half_day := _HALF_DAY.fullmatch(text):
        text = f"{half_day[1]} {half_day[2].lower()}m"
    if "mod" in text:
        text = _MODULUS.sub(lambda match: rf"\pmod{{{match[1] or match[2] or match[3]}}}", text)
    return _PLAIN_TIMES.sub(r" \\times ", text)
