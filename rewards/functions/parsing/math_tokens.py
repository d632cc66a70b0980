"""Splits an answer in LaTeX, Unicode or plain text into tokens, with one spelling for each symbol."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from mobula.rewards.functions.parsing.unicode_latex import to_latex

_MAX_DEPTH = 40  # of nested brackets


class UnreadableError(ValueError):
    """The text is no value of the grammar."""


def refuse(why: str) -> Any:
    """Raises `UnreadableError` in an expression."""
    raise UnreadableError(why)


class Token(NamedTuple):
    r"""A piece of an answer. `has_gap`: after a space; `is_text`: within `\text{}` or a similar command."""

    text: str
    has_gap: bool = False
    is_text: bool = False


_TEXT_OPENING = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mbox|emph|operatorname)(?![A-Za-z])(?:\s*\{)?"
_TOKEN = re.compile(
    rf"{_TEXT_OPENING}|\\(?:begin|end)\{{[a-zA-Z]+\}}|\\(?:[A-Za-z]+|.)|[^\W\d_]+|"
    r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z.]))?|\S",
    re.DOTALL,
)
_STYLE = frozenset(
    r"\boldsymbol \bm \underline \mathit \mathsf \mathtt \fbox \boxed \displaystyle \textstyle \scriptstyle \large"
    r" \Large \LARGE \huge \Huge \small \normalsize \footnotesize \tiny \rm \bf \it \limits \nolimits &".split()
)
_SPACING = frozenset({"\\,", "\\;", "\\:", "\\!", "\\ ", "\\quad", "\\qquad", "\\space", "~"})
_SAME = dict(
    pair.split("=", 1)
    for pair in (
        r"\dfrac=\frac \tfrac=\frac \cfrac=\frac \leq=\le \leqslant=\le \geq=\ge \geqslant=\ge \neq=\ne \lt=< \gt=>"
        r" \lbrace=\{ \rbrace=\} \langle=( \rangle=) \lvert=| \rvert=| \vert=| \mid=| \lVert=\| \rVert=\| \Vert=\|"
        r" \varnothing=\emptyset \ast=* \colon=: \wedge=\land \vee=\lor \lnot=\neg \implies=\Rightarrow"
        r" \iff=\Leftrightarrow \rightarrow=\to \longrightarrow=\to \backslash=\setminus \smallsetminus=\setminus"
        r" \lbrack=[ \rbrack=] \dbinom=\binom \tbinom=\binom \bmod=\pmod \mod=\pmod mod=\pmod \varphi=\phi"
        r" \varepsilon=\epsilon \vartheta=\theta \infin=\infty sqrt=\sqrt pi=\pi infinity=\infty \top=T 或=or 和=and"
        r" \begin{aligned}=\begin{cases} \end{aligned}=\end{cases} \begin{align}=\begin{cases} \end{align}=\end{cases}"
    ).split()
)


def _fraction(value: Fraction) -> str:
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = map(int, filter(None, match.groups()))
    return _fraction(whole + Fraction(above, below)) if above and below else match[0]


def _degrees(match: re.Match[str]) -> str:
    value = Fraction(match[1]) + Fraction(match[2]) / 60 + Fraction(match[3] or 0) / 3600
    return _fraction(value) + "\\degree "


def _repeating(match: re.Match[str]) -> str:
    """Returns a repeating decimal as a fraction: 0.1(6) is 1/10 + 6/90."""
    whole, fixed, *periods = match.groups()
    period = "".join(filter(None, periods))
    places = 10 ** len(fixed)
    return _fraction(Fraction(f"{whole or 0}.{fixed or 0}") + Fraction(int(period), (10 ** len(period) - 1) * places))


_OPERATORS = {"<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "=": r"\ne ", "<": r"\notless ", ">": r"\notgreater "}
_MOD = r"(?:\\(?:text|mathrm)\s*\{\s*mod\s*\}|\\b?mod(?![A-Za-z])|mod)(?:\s|\\[ ,;:])*"
_PERIOD = r"\\(?:overline|bar)\s*\{([0-9]+)\}|\\(?:overline|bar|dot)\s*([0-9])|\(([0-9]+)\)"
_REWRITINGS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern, re.DOTALL), new)
    for pattern, new in (
        (r"\\(begin|end)\s*\{\s*([a-zA-Z]+)\*?\s*\}", r"\\\1{\2}"),
        (r"\\left\s*\\\{\s*\\begin\{array\}(?:\{[^{}]*\})?(.*?)\\end\{array\}", r"\\begin{cases}\1\\end{cases}"),
        (r"\\begin\{array\}\s*\{[^{}]*\}", r"\\begin{array}"),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![A-Za-z]))", r"\\degree "),
        (r"\^\s*\{?\s*((?:\\prime(?![A-Za-z])\s*)+)\}?", lambda match: "'" * match[1].count("prime")),
        (
            r"(?<![\w.])([0-9]+)\s*\\[dtc]?frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))",
            _mixed,
        ),
        (r"(?<![\w.])([0-9]+)(?:\s|\\[,;:! ])+([0-9]+)\s*/\s*([0-9]+)", _mixed),
        (r"([0-9]+)\s*\\degree\s*([0-9]+)\s*'(?:\s*([0-9]+)\s*(?:''|\"))?", _degrees),
        (rf"\\pmod\s*\{{?\s*(\w+)\s*\}}?|\(\s*{_MOD}(\w+)\s*\)", lambda match: f"\\pmod {match[1] or match[2]} "),
        (rf"([0-9]*)\.([0-9]*)(?:{_PERIOD})", _repeating),
        (r"([0-9]*)\.([0-9]*)\\dot\s*\{([0-9])\}(?:([0-9]*)\\dot\s*\{([0-9])\})?", _repeating),
        (
            r"(?<![\w.])([0-9]{1,2}(?::[0-9]{2})?)(?:\s|\\[,;: ]|~)*(?:\\text\s*\{\s*)?"
            r"([aApP])(?:\.\s?)?[mM](?![A-Za-z])\.?\s*\}?",
            lambda match: f"{match[1]} \\text{{{match[2].lower()}m}}",
        ),
        (r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", r" \\times "),
        (r"(?<![\w)}\].])\]([^][(),]+,[^][(),]+)([][])", lambda match: f"({match[1]}{')' if match[2] == '[' else ']'}"),
        (r"\[([^][(),]+,[^][(),]+)\[(?!\w)", r"[\1)"),
        (r"\b([Pp])er\s+cent\b", r"\1ercent"),
        (r"\b([fgh])\s*\^\s*\{\s*-\s*1\s*\}\s*(?=\()", r"\1_{inverse}"),
        (r"\\not\s*([=<>])|<=|>=|!=", lambda match: _OPERATORS[match[1] or match[0]]),
    )
]
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:\\[,!]|\{,\}|,\\!)\s*[0-9]{3})+(?![0-9])")
_SPACED_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:(?: |\\[,! ]|~|')[0-9]{3})+(?:\.[0-9]+)?")
_COMMA_THOUSANDS = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_DEPTHS = {
    **dict.fromkeys(("(", "[", "{", "\\{", "\\lfloor", "\\lceil"), 1),
    **dict.fromkeys((")", "]", "}", "\\}", "\\rfloor", "\\rceil"), -1),
}


def plain(text: str) -> str:
    """Removes what changes no value: outer delimiters, pairs of dollar signs, marks between thousands, final stops."""
    text = " ".join(to_latex(text).split()).rstrip(".").rstrip()
    if text[:2] + text[-2:] in ("\\(\\)", "\\[\\]"):
        text = text[2:-2].strip()
    dollars = len(re.findall(r"(?<!\\)\$", text))
    text = re.sub(r"(?<!\\)\$", "" if dollars % 2 == 0 else r"\\$", text).strip() if dollars else text
    if _SPACED_THOUSANDS.fullmatch(text):
        return re.sub(r"[^-+.0-9]", "", text)
    return _THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)


def token_lists(text: str) -> list[list[Token]]:
    """Returns the tokens of a `plain` answer, with `1,234` as one number first, then with a comma that separates, as it
    always does within round and square brackets."""
    joined = _COMMA_THOUSANDS.sub(lambda match: match[0] if match[0][0] in "([" else match[0].replace(",", ""), text)
    return [_tokens(each) for each in dict.fromkeys((joined, text))]


def _tokens(text: str) -> list[Token]:
    for pattern, new in _REWRITINGS:
        text = pattern.sub(new, text)
    found = _scanned(text)
    while found and found[-1].text in (".", ",", "\\\\"):
        found.pop()
    while found and found[0].text in ("\\\\", "="):
        found.pop(0)
    split(found, ())
    return found


def _scanned(text: str) -> list[Token]:
    found: list[Token] = []
    braces: list[bool] = []  # open ones, and whether each is of a text
    end, has_gap, is_table = 0, False, "\\begin{" in text
    for match in _TOKEN.finditer(text):
        spelled = _SAME.get(match[0], match[0])
        is_opening = re.fullmatch(_TEXT_OPENING, spelled)
        is_gap = spelled in _SPACING or spelled == "}" and bool(braces) and braces.pop()
        has_gap = has_gap or match.start() > end or is_gap or spelled[-1] == "{" != spelled
        end = match.end()
        if spelled[-1] == "{" and spelled != "\\{":
            braces.append(spelled != "{")
        if is_gap or is_opening or (spelled in _STYLE and not (is_table and spelled == "&")):
            continue
        is_text = any(braces)
        if found and found[-1].text == "d" and re.fullmatch("[a-z]", spelled) and (has_gap or found[-1].is_text):
            spelled = found.pop().text + spelled  # a differential
        found.append(Token(spelled, has_gap, is_text))
        has_gap = False
    return found if not any(braces) else refuse("an open brace")


def _depth_of(token: Token) -> int:
    return _DEPTHS.get(token.text) or token.text.startswith("\\begin{") - token.text.startswith("\\end{")


def split(found: Sequence[Token], separators: Collection[str]) -> list[list[Token]]:
    """Splits tokens at separators outside of brackets."""
    pieces: list[list[Token]] = [[]]
    depth = 0
    for token in found:
        depth += _depth_of(token)
        if not 0 <= depth <= _MAX_DEPTH:
            raise UnreadableError("brackets do not match")
        if not depth and token.text in separators:
            pieces.append([])
        else:
            pieces[-1].append(token)
    if depth:
        raise UnreadableError("brackets do not match")
    return pieces


def closing(found: Sequence[Token], start: int) -> int:
    """Returns the index of the bracket that closes the bracket at `start`, of matching brackets."""
    depth = 0
    for index in range(start, len(found)):
        depth += _depth_of(found[index])
        if not depth:
            return index
    raise UnreadableError("brackets do not match")


def spelled(found: Sequence[Token]) -> str:
    """Returns the text of tokens, words in lower case: "Even" is "even", but Nk is not nk."""
    is_word = re.compile("(?=.*[aeiouyAEIOUY])..|[^\\W\\d_]{3}", re.DOTALL).match
    return " ".join(token.text.casefold() if is_word(token.text) else token.text for token in found)
