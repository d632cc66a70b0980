"""Malformed and constructed wrong answers for every rule: run with a number of answers, it prints what came out.

    python tests/unit/rewards/answers/fuzz_rewards.py 100000

An answer here is never right, by construction: a right one was changed in meaning, or garbage was made without the
characters that a right one needs. So a value of 1.0 is a defect, as is anything raised but a refusal, or a hang.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import RewardRequest, Score, ScoringFailure, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import Isolated, IsolatedPool
from mobula.rewards.tools import Tools

FIXTURES = Path(__file__).parent / "reward_fixtures"
_TABLES: dict[str, Any] = json.loads((FIXTURES / "changed.json").read_text())


@dataclass(frozen=True)
class Wrong:
    """A wrong answer, and what is right by the prompt."""

    text: str
    references: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)


# ---- garbage: no "q" or "Q", and no 8, which every right answer that it meets has

_SOUPS: tuple[str, ...] = (
    "()[]{}<>",
    "\\{}^_$&%#~ \n",
    "0123456790.,-+*/%e ",
    '{}[]":,.0123 eE+-truefalsn',
    "abcdefghijklmnoprstuvwxyz ",
    "PRS().,:* \n",
    "\u0660\u0661\u0967\uff11\u00b2\u2167\u4e94\u216b",
    "\u200b\u200d\u202e\ufeff\u0301\u00a0\u2028\x00\x1b\x7f\x85",
    "\ud800\udfff\udbff",
    "\U0001f41f\U0001f468\u200d\U0001f469\u732b\u0e33\u0130\u0131\u00df\ufb03\u1e9e",
)
_WORDS: list[str] = _TABLES["garbage"]


def garbage(rng: Random) -> str:
    """A few pieces of soup and of half-open words, most of them short."""
    pieces = []
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.5:
            pieces.append(rng.choice(_WORDS))
        else:
            soup = rng.choice(_SOUPS)
            pieces.append("".join(rng.choices(soup, k=rng.randint(0, 12))) * rng.choice((1, 1, 1, 1, 50)))
    text = "".join(pieces)
    return rng.choice((text, f"\\boxed{{{text}}}", f'{{"answer": {json.dumps(text)}}}', f"<answer>{text}</answer>"))


# ---- mathematics

# a right answer -> others that are not equal to it
_MATH: list[tuple[str, list[str]]] = list(_TABLES["mathematics"].items())


def _changed_number(rng: Random) -> tuple[str, str]:
    """A decimal, and another number that looks like it."""
    digits = "".join(rng.choices("123456789", k=rng.randint(1, 9)))
    point = rng.randint(0, len(digits) - 1)
    right = digits if rng.random() < 0.6 or not point else f"{digits[:point]}.{digits[point:]}"
    place = rng.choice([i for i, c in enumerate(right) if c != "."])
    other = str((int(right[place]) + rng.randint(1, 9)) % 10)
    wrongs = [
        right[:place] + other + right[place + 1 :], f"-{right}", f"{right}1" if "." in right else f"{right}0",
        f"{right},{other}", f"{right} or {other}", rf"{right} \text{{ and }} {other}", f"{right} {right}",
        f"{right}+{other}", f"not {right}", rf"\neq {right}", rf"{right}\text{{ or more}}",
        rf"{right}\text{{ million}}", rf"{right}\text{{ is wrong}}", rf"{right}\text{{k}}", rf"{right}\ldots",
        f"x > {right}", f"{right}x", f"{right}/7", f"{right}^3" if right != "1" else "2", f"10{right}",
        "".join(chr(0x660 + int(c)) if c.isdigit() else c for c in right),
        right.replace(".", "") + "." if "." in right else f"{right}.5", f"{right}e5",
        rf"\sqrt{{{right}}}" if right != "1" else "3",
    ]  # fmt: skip
    return right, rng.choice(wrongs)


def _math(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.6:
        return _changed_number(rng)
    right, wrongs = rng.choice(_MATH)
    return right, rng.choice(wrongs)


def _math_boxed(rng: Random) -> Wrong:
    right, wrong = _math(rng)
    box = rf"\boxed{{{wrong}}}"
    frames = (box, f"It is ${wrong}$, so $${box}$$", rf"\boxed{{{right}}}, no: {box}")
    no_answer = (right, rf"\boxed{{{right}", rf"\\boxed{{{right}}}", rf"\boxed{{}} {right}", rf"\boxed {{{right}")
    return Wrong(rng.choice(frames if rng.random() < 0.9 else no_answer), (right,))


def _math_whole(rng: Random) -> Wrong:
    right, wrong = _math(rng)
    frames = (wrong, f"${wrong}$", rf"{right}, or rather \boxed{{{wrong}}}", f"It is {right} or it is {wrong}.")
    return Wrong(rng.choice(frames), (right,))


def _math_json(rng: Random) -> Wrong:
    right, wrong = _math(rng)
    good, bad = json.dumps(right), json.dumps(wrong)
    frames = (f'{{"answer": {bad}}}', f'```json\n{{"answer": {bad}}}\n```', f'{{"answer": {bad}, "was": {good}}}')
    no_answer = (
        *(f'{{"answer": {good}, "answer": {bad}}}', f'{{"answer": [{good}]}}', f'{{"answer": {good}', f"[{good}]"),
        *(f'{{"Answer": {good}}}', f'{{"answer": {{"answer": {good}}}}}', right, f'{{"answer": {good}}} {{}}'),
    )
    return Wrong(rng.choice(frames if rng.random() < 0.8 else no_answer), (right,))


# ---- texts

_NAMES: list[str] = _TABLES["names"]


def _changed_text(rng: Random) -> tuple[str, str]:
    right = rng.choice(_NAMES)
    place = rng.randrange(len(right))
    other = rng.choice([c for c in "abz059\u00e9" if c.casefold() != right[place].casefold()])
    before, after = right[:place], right[place:]
    wrongs = (
        *(before + other + after[1:], right + other, other + right, before + other + after),
        *(right[:-1] or other, right[1:] or other, f"{before}\u200b{after}" if place else other),
    )
    return right, rng.choice([wrong for wrong in wrongs if wrong.strip().casefold() != right.casefold()])


def _exact_whole(rng: Random) -> Wrong:
    right, wrong = _changed_text(rng)
    frames = (f"not {right}", f"{right} or {wrong}", f'"{right}"', f"{right}.", f"{right} {right}", f"the {right}")
    return Wrong(rng.choice((wrong, *frames)), (right,))


def _exact_anywhere(rng: Random) -> Wrong:
    right = rng.choice(_NAMES)
    frames = [f"{a}{right}{b}" for a, b in (("un", "x"), ("x", ""), ("", "ed"), ("9", "9"), ("_", "_"), ("\u00e9", ""))]
    if right[0].isdigit():
        frames += [f"-{right}", f"3.{right}", f"1,{right}", f"5/{right}", f".{right}", f"\u2212{right}", f"2:{right}"]
    if right[-1].isdigit():
        frames += [f"{right}.5", f"{right}/8", f"{right}%", f"{right} %", f"{right},000", f"{right}:30", f"{right}-9"]
    return Wrong(f"It is {rng.choice(frames)} there", (right,))


def _exact_tags(rng: Random) -> Wrong:
    right, wrong = _changed_text(rng)
    frames = (
        *(f"<answer>{wrong}</answer>", f"<think>{right}</think><answer>{wrong}</answer>", f"<answer>{right}", right),
        *(f"<answer>{right}</answer><answer>{wrong}</answer>", f"</answer>{right}<answer>"),
        f"<answer></answer>{right}",
    )
    return Wrong(rng.choice(frames), (right,))


def _choice(rng: Random) -> Wrong:
    a, b = rng.sample("PQRS", 2)
    frame = rng.choice(_TABLES["choices"])  # about the right letter <a> and another one <b>
    return Wrong(frame.replace("<a>", a).replace("<b>", b), (a,))


def _choice_last_line(rng: Random) -> Wrong:
    made = _choice(rng)
    return Wrong(f"answer: {made.references[0]}\n{made.text.strip() or 'neither'}", made.references)


def _anls(rng: Random) -> Wrong:
    right, wrong = _changed_text(rng)
    return Wrong(wrong if rng.random() < 0.7 else f"{right} {' ' * rng.randint(0, 3000)}{wrong}", (right,))


def _anls_json(rng: Random) -> Wrong:
    made = _anls(rng)
    return Wrong(json.dumps({"answer": made.text}) if rng.random() < 0.9 else made.text, made.references)


def _relaxed(rng: Random) -> Wrong:
    right = rng.choice((1, -1)) * round(10 ** rng.uniform(-6, 9), 6)
    factor = rng.choice((0.94, 1.06, 0, -1, 10, 0.1, 100, 0.01, 1e300, -1e-300))
    frames = (
        *(f"{right * factor!r}", f"{right * factor:.9e}", f"{right!r} {right!r}", f"about {right!r}", f"{right!r}x"),
        *(f"{right!r}%", f"{right!r}%%", f"={right!r}", "nan", "inf", "-inf", "1e999", "NaN%", "", "%"),
    )
    return Wrong(rng.choice(frames), (repr(right),))


# ---- entities, boxes, shapes, and the rest

_ENTITIES = ("cat", "red car", "14", "1,000", "2014", "New York", "3.5", "10%", "the U.S.")


def _grounding(rng: Random) -> Wrong:
    evidence = rng.sample(_ENTITIES, rng.randint(1, 4))
    claims = list(evidence)
    change = rng.randrange(4)
    if change == 0:
        claims.append(rng.choice(("dog", "not cat", "15", "page 14 of 2020", "1,00", "-14", "14%", "2014 dogs", "car")))
    elif change == 1:
        claims.pop()
    elif change == 2:
        claims[rng.randrange(len(claims))] = rng.choice(("category", "140", "1.000", "20140", "redcar", ""))
    else:
        claims = [f"not {claim}" for claim in claims] * 3
    return Wrong(json.dumps({"entities": claims * rng.randint(1, 3)}), (), {"evidence": evidence})


def _boxes(rng: Random, form: str) -> tuple[list[list[int]], list[list[int]]]:
    """Boxes, and others that do not lie on all of them."""
    wanted = []
    for index in range(rng.randint(1, 4)):
        left, top = rng.randint(0, 100) + 300 * index, rng.randint(0, 900)
        width, height = rng.randint(5, 100), rng.randint(5, 100)
        wanted.append([left, top, width, height] if form == "xywh" else [left, top, left + width, top + height])
    found = [list(box) for box in wanted]
    change = rng.randrange(4)
    if change == 0:
        found[rng.randrange(len(found))][rng.randrange(2, 4)] += rng.randint(1, 50)
    elif change == 1:
        found.append([0, 0, 1, 1])
    elif change == 2:
        found.append(list(found[0]))
    else:
        no_area = [5, 5, 0, 0] if form == "xyxy" else [5, 5, -1, 3]
        found[0] = rng.choice((no_area, [0, 0], [], ["x"] * 4, [0, 0, 10**400, 10**400]))
    return wanted, found


def _iou(rng: Random) -> Wrong:
    wanted, found = _boxes(rng, "xyxy")
    return Wrong(json.dumps(found), (), {"boxes": wanted})


def _iou_boxed(rng: Random) -> Wrong:
    wanted, found = _boxes(rng, "xywh")
    return Wrong(rf"\boxed{{{json.dumps(found)}}}" if rng.random() < 0.9 else json.dumps(wanted), (), {"boxes": wanted})


def _format_tags(rng: Random) -> Wrong:
    parts = ["<think>", "a", "</think>", "<answer>", "7", "</answer>"]
    change = rng.randrange(4)
    place = rng.choice((0, 2, 3, 5))
    if change == 0:
        del parts[place]
    elif change == 1:
        parts.insert(rng.randint(0, 6), parts[place])
    elif change == 2:
        parts.insert(rng.choice((0, 3, 6)), rng.choice(("x", "\u200b", "<", "</answer", "&nbsp;")))
    else:
        parts[4] = rng.choice(("", " ", "\n\t", "\u00a0"))
    return Wrong("".join(parts))


def _language(rng: Random) -> Wrong:
    frames = (
        "Die Katze sitzt heute auf der gr\u00fcnen Matte und schl\u00e4ft.",
        "Le chat dort aujourd'hui sur le tapis vert de la maison.",
        "\u732b\u4eca\u5929\u5750\u5728\u7eff\u8272\u7684\u57ab\u5b50\u4e0a\u7761\u89c9\u3002",
    )
    english = "The cat sleeps on the green mat of the house today. "
    return Wrong(english * rng.randint(0, 3) + rng.choice(frames))


# ---- what the rules make of them

BATCH = 100
HUGE = 10_000_000  # characters

_PIXELS = {"response_scale": "pixels", "scale": "pixels", "min_iou": 0.0}
_LOOSE = {"ignore_case": True}
_SPOKEN = ["en", "de", "fr", "zh"]
RULES: dict[str, tuple[str, dict[str, Any], Callable[[Random], Wrong] | None]] = {
    # what is fuzzed -> function, options, and what makes wrong answers
    "math_boxed": ("math_answer", {"require_boxed": True}, _math_boxed),
    "math_whole": ("math_answer", {"require_boxed": False}, _math_whole),
    "math_json": ("math_answer", {"extract": "fenced_json:answer"}, _math_json),
    "exact_whole": ("exact_match", {**_LOOSE, "whole_response": True}, _exact_whole),
    "exact_anywhere": ("exact_match", {**_LOOSE, "whole_response": False}, _exact_anywhere),
    "exact_tags": ("exact_match", {**_LOOSE, "whole_response": True, "extract": "tags:answer"}, _exact_tags),
    "choice": ("multiple_choice", {"letters": "PQRS", "extract": "whole"}, _choice),
    "choice_last_line": ("multiple_choice", {"letters": "PQRS", "extract": "last_line"}, _choice_last_line),
    "anls_raw": ("anls", {"threshold": 0.5, "lengths": "raw", "extract": "whole"}, _anls),
    "anls_json": ("anls", {"threshold": 0.0, "lengths": "folded", "extract": "json:answer"}, _anls_json),
    "relaxed": ("relaxed_accuracy", {"tolerance": 0.05, "extract": "whole"}, _relaxed),
    "grounding": ("grounding", {"claims": "json:entities", "evidence": "evidence"}, _grounding),
    "iou": ("iou", {"extract": "whole", "boxes": "boxes", "form": "xyxy", **_PIXELS}, _iou),
    "iou_json": ("iou", {"extract": "boxed", "boxes": "boxes", "form": "xywh", **_PIXELS}, _iou_boxed),
    "format_boxed": ("format", {"preset": "boxed"}, lambda rng: Wrong(rng.choice(_TABLES["boxes"]))),
    "format_tags": ("format", {"tags": ["think", "answer"]}, _format_tags),
    "format_json": ("format", {"json_fields": ["answer"]}, lambda rng: Wrong(rng.choice(_TABLES["json"]))),
    "format_pattern": ("format", {"pattern": r"q(\w+\s?)*q"}, None),
    "cost": ("cost", {"target_tokens": 10, "latency_budget_ms": 100}, None),
    "overlong": ("overlong", {"max_tokens": 100, "buffer_tokens": 50, "penalty": 1.0}, None),
    "language": ("language", {"language": "en", "among": _SPOKEN, "min_letters": 6}, _language),
}
WRONG = {rule: make for rule, (*_, make) in RULES.items() if make is not None}
METADATA = {"evidence": ["zyzzyva", "48611"], "boxes": [123, 456, 345, 789], "latency_ms": 150.0}
REFERENCES: dict[str, tuple[str, ...]] = {"choice": ("Q",), "choice_last_line": ("(Q)",)}
Cases = dict[str, list[tuple[str, RewardRequest]]]
RIGHT = ("48611", "zyzzyvaq")  # what the other rules are asked for: garbage has no q, and no 8


@dataclass
class Findings:
    """What came out, and every defect with the answer that shows it."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)  # CPU time of a batch in this process, by rule

    def add(self, rule: str, text: str, outcome: Score | ScoringFailure, may_be_one: bool) -> None:
        kind = f"failure {outcome.kind}" if isinstance(outcome, ScoringFailure) else "value"
        self.outcomes.setdefault(rule, Counter())[kind] += 1
        if isinstance(outcome, Score) and outcome.value >= 1.0 and not may_be_one:
            self.defects.append(f"{rule} gave 1.0 to {text[:200]!r}")
        if isinstance(outcome, ScoringFailure) and "raised" in outcome.reason:
            self.defects.append(f"{rule}: {outcome.reason[:200]} for {text[:200]!r}")


def build(isolated: Isolated) -> dict[str, Any]:
    """Every rule that is fuzzed."""
    tools = Tools(isolated, "cpu", "float32")
    return {rule: build_function(name, options, tools) for rule, (name, options, _) in RULES.items()}


def asked(rule: str, text: str, references: Sequence[str] = (), **metadata: Any) -> RewardRequest:
    references = tuple(references) or REFERENCES.get(rule, RIGHT)
    return RewardRequest(Response(text, 12, False), references, {**METADATA, **metadata}, "")


def corpus(size: int) -> Iterator[list[str]]:
    """The committed texts: the short ones together, then each of those that are made of repetitions, `size` long."""
    entries = [json.loads(line) for line in (FIXTURES / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    yield [entry for entry in entries if isinstance(entry, str)]
    for entry in entries:
        if isinstance(entry, dict):
            unit = entry["repeat"]
            yield [entry.get("before", "") + unit * (size // len(unit)) + entry.get("after", "")]


def fuzz_wrong(functions: dict[str, Any], num_answers: int, rng: Random, findings: Findings) -> None:
    """Right answers whose meaning was changed: none may get 1.0."""
    cases: Cases = {rule: [] for rule in WRONG}
    for rule in islice(cycle(WRONG), num_answers):
        made = WRONG[rule](rng)
        cases[rule].append((made.text, asked(rule, made.text, made.references, **made.metadata)))
    _score(functions, cases, findings, may_be_one=())


def fuzz_garbage(functions: dict[str, Any], num_answers: int, rng: Random, findings: Findings) -> None:
    """Texts that are no answer to anything."""
    cases: Cases = {rule: [] for rule in RULES}
    for rule in islice(cycle(RULES), num_answers):
        text = garbage(rng)
        cases[rule].append((text, asked(rule, text)))
    _score(functions, cases, findings, may_be_one=MAY_BE_ONE)


def fuzz_corpus(functions: dict[str, Any], size: int, findings: Findings) -> None:
    """Every text of the corpus for every one of the functions."""
    for texts in corpus(size):
        cases = {rule: [(text, asked(rule, text)) for text in texts] for rule in functions}
        _score(functions, cases, findings, may_be_one=MAY_BE_ONE)


MAY_BE_ONE = ("format_boxed", "format_tags", "format_json", "format_pattern", "language")  # whatever the answer


def _score(functions: dict[str, Any], cases: Cases, findings: Findings, may_be_one: Sequence[str]) -> None:
    for rule, texts in cases.items():
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            started = time.process_time()
            outcomes = evaluate_batch(functions[rule], [request for _, request in batch])
            findings.slowest_s[rule] = max(findings.slowest_s.get(rule, 0.0), time.process_time() - started)
            for (text, _), outcome in zip(batch, outcomes, strict=True):
                findings.add(rule, text, outcome, rule in may_be_one)


def main(num_answers: int, seed: int, size: int) -> int:
    """Fuzz, print what came out, and return how many defects there are."""
    pool = IsolatedPool(num_processes=2, timeout_s=5, start_timeout_s=120)
    functions, findings, rng = build(pool), Findings(), Random(seed)
    started = time.monotonic()
    fuzz_wrong(functions, num_answers // 2, rng, findings)
    fuzz_garbage(functions, num_answers - num_answers // 2, rng, findings)
    middle = time.monotonic()
    slowest = dict(findings.slowest_s)
    findings.slowest_s.clear()
    fuzz_corpus(functions, size, findings)
    pool.close()
    for rule, kinds in findings.outcomes.items():
        most = f"slowest {slowest[rule]:.2f} s of CPU time here, of the corpus {findings.slowest_s[rule]:.2f} s"
        print(f"{rule:18} {dict(kinds)}; {most}")
    print(f"{num_answers} answers took {middle - started:.0f} s, the corpus {time.monotonic() - middle:.0f} s")
    print(f"{len(findings.defects)} defects", *findings.defects[:40], sep="\n")
    return len(findings.defects)


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    sys.exit(bool(main(*arguments, *(3000, 0, HUGE)[len(arguments) :])))
