"""Scores a whole source, part by part in a few processes, and gives one result whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

from mobula.rewards.offline.options import ScoreOptions
from mobula.rewards.offline.partial import Partial
from mobula.rewards.offline.processes import Pulse, run_in_order
from mobula.rewards.offline.scoring import SchemeScorer
from mobula.rewards.offline.sources.jsonl import Batch
from mobula.rewards.offline.sources.source import Source, SourcePart

PIECE_RECORDS = 64  # of what may hang: a piece shares one deadline, and its pictures are in memory together


class BrokenSourceError(ValueError):
    """A part of the source cannot be read, or a line is no record and none may be left out."""


def evaluate(
    source: Source,
    scorer: SchemeScorer,
    options: ScoreOptions,
    *,
    num_processes: int,
    timeout_s: float,
    is_strict: bool = False,
    rows: BinaryIO | None = None,
    on_progress: Callable[[int], None] = lambda size: None,
) -> Partial:
    """The results of all records; memory does not grow with their number. `rows` gets each record's results.

    Raises:
        BrokenSourceError: a part cannot be read, or a line is no record, with `is_strict`.
        WorkerDiedError, DeadlineError: a process died, or none got on for `timeout_s`.
    """
    with_metadata = any(scheme.rules.reads_everything for scheme in scorer.schemes)
    piece_records = PIECE_RECORDS if scorer.may_hang else None
    pulse = Pulse()

    def score_part(part: SourcePart) -> Partial:
        found, lines = Partial.of(scorer.schemes), []
        scorer.prepare()
        pulse.beat()
        for batch in _read(part, with_metadata, piece_records):
            partial = scorer.score(batch)
            pulse.beat()
            lines.append(partial.rows)
            found.merge(partial, scorer.schemes, options.top_k, options.max_ids)
        found.rows = b"".join(lines)
        return found

    whole = Partial.of(scorer.schemes)
    partials = run_in_order(
        score_part,
        source.parts,
        num_processes=num_processes,
        timeout_s=timeout_s,
        may_hang=scorer.may_hang or bool(options.regex_pattern),  # a user's pattern may backtrack without end
        pulse=pulse,
        is_spent=lambda: scorer.num_stuck > 0,
    )
    for part, partial in zip(source.parts, partials, strict=True):
        if rows is not None:
            rows.write(partial.rows)
        whole.merge(partial, scorer.schemes, options.top_k, options.max_ids)
        if is_strict and whole.num_broken:
            line, reason = whole.broken[0]
            raise BrokenSourceError(f"{source.path}, line {line}: {reason}; fix it, or leave out --strict to skip it")
        on_progress(part.size)
    return whole


def _read(part: SourcePart, with_metadata: bool, piece_records: int | None) -> Iterator[Batch]:
    """The part's batches, in pieces of so many records."""
    try:
        if piece_records is None:
            yield from part.batches(with_metadata=with_metadata)
        else:
            for batch in part.batches(with_metadata=with_metadata):
                yield from batch.pieces(piece_records)
    except OSError as error:  # of this generator alone: what scores the batch raises past it
        raise BrokenSourceError(
            f"{part} cannot be read ({error}): give a whole file that is not being changed"
        ) from error
