r"""Rewrites Unicode mathematics as LaTeX and LaTeX accents as characters: `x²` as `x^{2}` and `\'e` as `é`."""

from __future__ import annotations

import re
import unicodedata

_SYMBOLS = {
    **{"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{HYPHEN}": "-", "\N{NON-BREAKING HYPHEN}": "-"},
    **{"×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*", "⁄": "/", "∕": "/"},
    **{"≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp "},
    **{"∞": r"\infty ", "∅": r"\emptyset ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∠": r"\angle "},
    **{"°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "℃": r"^\circ C", "℉": r"^\circ F"},
    **{"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}"},
    **{"≈": r"\approx ", "≡": r"\equiv ", "→": r"\to ", "⊂": r"\subset ", "⊆": r"\subseteq ", "∉": r"\notin "},
    **{"△": r"\triangle ", "∑": r"\sum ", "∫": r"\int ", "⊥": r"\perp ", "∥": r"\parallel ", "∶": ":", "、": ", "},
    **{"′": "'", "″": "''", "\N{OHM SIGN}": r"\Omega ", "\N{MICRO SIGN}": r"\mu "},
}
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lamda mu nu xi pi rho sigma tau upsilon phi chi psi omega"
)
_GREEK_LETTERS = {
    **{unicodedata.lookup(f"GREEK SMALL LETTER {n}"): f"\\{n.replace('lamda', 'lambda')} " for n in _GREEK.split()},
    **{
        unicodedata.lookup(f"GREEK CAPITAL LETTER {n}"): f"\\{n.capitalize().replace('Lamda', 'Lambda')} "
        for n in "gamma delta theta lamda xi pi sigma phi psi omega".split()
    },
}
GREEK_NAMES = frozenset(command.strip("\\ ") for command in _GREEK_LETTERS.values())
_TABLE = str.maketrans(_SYMBOLS)
_GREEK_TABLE = str.maketrans(_GREEK_LETTERS)

_SCRIPT = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+)|[₀₁₂₃₄₅₆₇₈₉₊₋]+")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+(?:\.[0-9]+)?|[A-Za-z]|\\[A-Za-z]+))")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
# Full-width and small forms, letters and digits of mathematical alphabets, squared units.
_FULL_WIDTH = re.compile("[\uff01-\uff5e\u3000￠-￦\ufe50-\ufe6b\u3371-\u33df\U0001d400-\U0001d7ff]")
_GREEK_LETTER = re.compile("[\u0391-\u03c9]")
_GREEK_WORD = re.compile("[\u0370-\u03ff\u1f00-\u1fff]{3,}")

_MARKS = str.maketrans("\N{IDEOGRAPHIC FULL STOP}\N{MINUS SIGN}\N{RIGHT SINGLE QUOTATION MARK}", ".-'")

MAX_MARKS = 30  # accents in a row
GRAPHEME_JOINER = "\N{COMBINING GRAPHEME JOINER}"
_RUN = re.compile(rf"[^\w\s\x00-\x7f]{{{MAX_MARKS + 1},}}")  # no accent is a word character

_ACCENTS = {"'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303", "c": "\u0327", "H": "\u030b"}
_ACCENT = re.compile(r"""\\(?:(['`^"~])\s*(?:\{\s*([A-Za-z])\s*\}|([A-Za-z]))|([cH])\s*\{\s*([A-Za-z])\s*\})""")


def to_latex(text: str) -> str:
    """Rewrites mathematical symbols as LaTeX, full-width forms as ASCII and accents as single characters."""
    if "\\" in text:
        text = _ACCENT.sub(_accented, text)
    if text.isascii():
        return text
    text = plain_forms(text)
    text = _SCRIPT.sub(lambda run: ("^{" if run[1] else "_{") + unicodedata.normalize("NFKC", run[0]) + "}", text)
    text = _VULGAR_FRACTION.sub(_fraction, text)
    if _GREEK_LETTER.search(text) and not _GREEK_WORD.search(text):  # a word in Greek stays a word
        text = text.translate(_GREEK_TABLE)
    text = _ROOT.sub(lambda root: _ROOTS[root[1]] + "{" + (root[2] or root[3] or root[4] or "") + "}", text)
    return text.translate(_TABLE)


def plain_forms(text: str) -> str:
    """Composes accents (NFC) and rewrites full-width forms, minus signs and apostrophes as ASCII."""
    if text.isascii():
        return text
    text = _FULL_WIDTH.sub(lambda form: unicodedata.normalize("NFKC", form[0]), composed(text))
    return text.translate(_MARKS)


def composed(text: str) -> str:
    """Composes accents (NFC) in linear time."""
    return text if text.isascii() else unicodedata.normalize("NFC", _RUN.sub(_parted, text))


def _parted(run: re.Match[str]) -> str:
    """Separates runs of more than `MAX_MARKS` accents, as the stream-safe format of Unicode does (UAX 15, section 13):
    no script has longer runs, and NFC sorts a run in quadratic time."""
    parted, num_marks = [], 0
    for character in run[0]:
        num_marks = num_marks + 1 if unicodedata.combining(character) else 0
        if num_marks > MAX_MARKS:
            parted.append(GRAPHEME_JOINER)
            num_marks = 1
        parted.append(character)
    return "".join(parted)


def _accented(accent: re.Match[str]) -> str:
    mark, letter = (accent[1], accent[2] or accent[3]) if accent[1] else (accent[4], accent[5])
    return unicodedata.normalize("NFC", letter + _ACCENTS[mark])


def _fraction(character: re.Match[str]) -> str:
    numerator, denominator = unicodedata.normalize("NFKC", character[0]).split("\N{FRACTION SLASH}")
    return rf"\frac{{{numerator}}}{{{denominator}}}"
