"""Scores a batch of records by all schemes at once and keeps of it what a report needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from mobula.rewards.offline.options import ScoreOptions
from mobula.rewards.offline.partial import Partial, ScoredRecord
from mobula.rewards.offline.rules.answers import read_answer
from mobula.rewards.offline.rules.schemes import Scheme, Scores
from mobula.rewards.offline.sources.jsonl import Batch
from mobula.rewards.offline.sources.records import Record
from mobula.rewards.offline.tally import differing

Outcome = tuple[Scores | str, ...]  # of one record, one a scheme
MANUAL_SCHEME = 0  # the published one: its verifier is above 0 where a reference stands anywhere in the response
VERDICT = "verdict"
MAX_TEXT_CHARS = 2000  # of a prompt or a response that is shown
MAX_REFERENCES = 10
_encode = msgspec.json.Encoder().encode


class SchemeScorer:
    """Scores batches by `schemes`, aeroRL's first, and compares the two of `compared` (places among the schemes).

    Records of equal outcome are counted, and everything else is done once for an outcome, so that the cost of a record
    is that of its rules.
    """

    def __init__(
        self, schemes: tuple[Scheme, ...], options: ScoreOptions, *, compared: tuple[int, int], writes_rows: bool
    ) -> None:
        self.schemes = schemes
        self._options = options
        self.compared = compared
        self._writes_rows = writes_rows

    @property
    def may_hang(self) -> bool:
        return any(scheme.rules.may_hang for scheme in self.schemes)

    @property
    def num_stuck(self) -> int:
        """Computations that hang in this process; only another one is rid of them."""
        return sum(scheme.rules.num_stuck for scheme in self.schemes)

    def prepare(self) -> None:
        """Make ready in this process what scoring takes."""
        for scheme in self.schemes:
            scheme.rules.prepare()

    def score(self, source: Batch) -> Partial:
        """All results of a batch; its records and lines are counted from 1."""
        records = source.records
        codes, outcomes = self._codes(records)
        partial = Partial.of(self.schemes)
        partial.num_records, partial.num_lines = len(records), source.num_lines
        partial.num_broken, partial.broken = source.num_broken, list(source.broken)
        counts = Counter(codes)
        for code, outcome in enumerate(outcomes):
            is_manual_pass = passes_manually(outcome)
            partial.num_manual_passes += counts[code] * is_manual_pass
            for scheme, results, result in zip(self.schemes, partial.schemes, outcome, strict=True):
                results.tally.add(scheme, result, is_manual_pass, counts[code])
        batch = _Scored(records, codes, outcomes, self.schemes)
        self._find_examples(batch, partial)
        self._disagree(batch, counts, partial)
        if self._writes_rows:
            partial.rows = b"".join(batch.rows())
        return partial

    def _codes(self, records: Sequence[Record]) -> tuple[list[int], list[Outcome]]:
        """Each record's outcome as its place in the list of different ones."""
        references = [record.references for record in records]
        answers = [read_answer(record.response) for record in records]
        results = [scheme.rules.score_batch(records, references, answers) for scheme in self.schemes]
        places: dict[Outcome, int] = {}
        codes = [places.setdefault(outcome, len(places)) for outcome in zip(*results, strict=True)]
        return codes, list(places)

    def _find_examples(self, batch: _Scored, partial: Partial) -> None:
        for place, (scheme, results) in enumerate(zip(self.schemes, partial.schemes, strict=True)):
            totals = {
                code: scheme.total(outcome[place])
                for code, outcome in enumerate(batch.outcomes)
                if not isinstance(outcome[place], str)
            }
            by_total = sorted(totals, key=lambda code: -totals[code])
            results.best = batch.examples(batch.first(_groups(by_total, totals), self._options.top_k))
            worst = batch.first(_groups(by_total[::-1], totals), self._options.top_k, from_end=True)
            results.worst = batch.examples(worst[::-1])
            if results.tally.num_false_passes and self._options.max_ids:
                caught = {
                    code
                    for code in totals
                    if passes_manually(batch.outcomes[code]) and totals[code] < scheme.pass_threshold
                }
                results.false_pass_ids = sorted(batch.ids(caught))[: self._options.max_ids]

    def _disagree(self, batch: _Scored, counts: Counter[int], partial: Partial) -> None:
        """Count where the two compared schemes differ, and show the first records of each kind."""
        first, second = (self.schemes[place] for place in self.compared)
        kinds: dict[str, set[int]] = {}
        for code, outcome in enumerate(batch.outcomes):
            results = (outcome[self.compared[0]], outcome[self.compared[1]])
            if results[0] == results[1]:
                continue
            partial.disagreement.add(first, second, results, counts[code])
            for name in differing(first, second, results):
                kinds.setdefault(name, set()).add(code)
            if first.passes(results[0]) != second.passes(results[1]):
                kinds.setdefault(VERDICT, set()).add(code)
        for name, codes in kinds.items():
            partial.disagreeing[name] = batch.examples(batch.first([codes], self._options.top_k))


def passes_manually(outcome: Outcome) -> bool:
    """Whether the manual baseline takes the response: some reference stands in it, letter by letter."""
    return outcome[MANUAL_SCHEME][0] > 0


class _Scored:
    """The records of a batch and the code of each one's outcome."""

    def __init__(
        self, records: Sequence[Record], codes: list[int], outcomes: list[Outcome], schemes: tuple[Scheme, ...]
    ) -> None:
        self.outcomes = outcomes
        self._records = records
        self._codes = codes
        self._schemes = schemes

    def first(self, groups: Iterable[set[int]], num: int, *, from_end: bool = False) -> list[int]:
        """The places of the first (or last) `num` records, group after group of codes."""
        found: list[int] = []
        for group in groups:
            if len(found) >= num:
                break
            places = range(len(self._codes) - 1, -1, -1) if from_end else range(len(self._codes))
            found += islice((i for i in places if self._codes[i] in group), num - len(found))
        return found

    def ids(self, codes: set[int]) -> list[str]:
        """The ids of the records with these outcomes; those without one are only counted."""
        found = (r.id for r, code in zip(self._records, self._codes, strict=True) if code in codes)
        return [str(id_) for id_ in found if id_ is not None]

    def examples(self, places: Iterable[int]) -> list[ScoredRecord]:
        return [self._example(place) for place in places]

    def rows(self) -> Iterator[bytes]:
        """A line of JSON a record: its id, and by scheme the total and the components or why there are none."""
        shared = [_encode({"reward": self._results(outcome)})[1:] + b"\n" for outcome in self.outcomes]
        for record, code in zip(self._records, self._codes, strict=True):
            yield b'{"id":' + _encode(record.id) + b"," + shared[code]

    def _results(self, outcome: Outcome) -> dict[str, Any]:
        return {
            scheme.name: {"unscored": result}
            if isinstance(result, str)
            else {"total_reward": scheme.total(result), "components": scheme.named(result)}
            for scheme, result in zip(self._schemes, outcome, strict=True)
        }

    def _example(self, place: int) -> ScoredRecord:
        record, outcome = self._records[place], self.outcomes[self._codes[place]]
        answer = read_answer(record.response)
        pairs = list(zip(self._schemes, outcome, strict=True))
        return ScoredRecord(
            record=place + 1,
            id=record.id,
            prompt=shortened(record.prompt),
            response=shortened(record.response),
            references=tuple(map(shortened, record.references[:MAX_REFERENCES])),
            scores={s.name: r if isinstance(r, str) else s.named(r) for s, r in pairs},
            totals={s.name: None if isinstance(r, str) else s.total(r) for s, r in pairs},
            details={s.name: s.rules.explain(place, record, answer) for s, _ in pairs},
        )


def shortened(text: str) -> str:
    """The text, or its beginning and how much was left out."""
    left_out = len(text) - MAX_TEXT_CHARS
    return text if left_out <= 0 else f"{text[:MAX_TEXT_CHARS]} [... {left_out} characters more]"


def _groups(codes: Sequence[int], totals: dict[int, float]) -> Iterator[set[int]]:
    """Codes that stand side by side with the same total."""
    group: set[int] = set()
    for code in codes:
        if group and totals[next(iter(group))] != totals[code]:
            yield group
            group = set()
        group.add(code)
    if group:
        yield group
