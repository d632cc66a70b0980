"""Scores a source in batches by several processes; the result does not depend on their number."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import BinaryIO

from mobula.cluster.errors import DeadlineError, PreflightError, WorkerDiedError
from mobula.cluster.runtime.child.process import ChildProcess
from mobula.rewards.offline import scorer
from mobula.rewards.offline.rows import Batch, Source
from mobula.rewards.offline.scorer import ScoredBatch, ScoreSummary, ScoringOptions

LEAST_ROWS, MOST_ROWS = 64, 4096  # of one batch
SHORT_S, LONG_S = 1.0, 5.0  # after a shorter batch sizes double, after a longer batch they restart at LEAST_ROWS
AHEAD = 3  # batches per process that may be pending, because results are yielded in order
START_TIMEOUT_S = 300.0  # to import and build the reward functions


def score_source(
    source: Source,
    options: ScoringOptions,
    *,
    num_processes: int,
    is_strict: bool = False,
    rows: BinaryIO | None = None,
    on_progress: Callable[[int], None] = lambda size: None,
) -> ScoreSummary:
    """Returns the summary of all records, in constant memory. Writes the result of each record to `rows`, in order."""
    whole = ScoreSummary()
    try:
        for scored in _in_order(source, options, num_processes):
            if rows is not None:
                rows.write(scored.rows)
            whole.merge(scored.summary, options.top_k, options.max_ids)
            if is_strict and whole.num_broken:
                row, fault = whole.broken[0]
                raise PreflightError(f"{source.path}, row {row}: {fault}; fix it, or leave out --strict to skip it")
            on_progress(scored.size)
    except OSError as error:
        if isinstance(error, DeadlineError):
            raise
        raise PreflightError(f"{source.path} cannot be read ({error}): give a whole file") from error
    return whole


def _in_order(source: Source, options: ScoringOptions, num_processes: int) -> Iterator[ScoredBatch]:
    children = [ChildProcess() for _ in range(num_processes)]
    idle: SimpleQueue[ChildProcess] = SimpleQueue()
    for child in children:
        idle.put(child)
    num_rows = LEAST_ROWS

    def score(batch: Batch) -> ScoredBatch:
        nonlocal num_rows
        child = idle.get()
        rows = f"rows {batch.first:,} to {batch.first + len(batch.rows) - 1:,} of {source.path}"
        try:
            if not child.is_running:
                child.call(START_TIMEOUT_S, scorer.start, options)
            started = time.monotonic()
            scored = child.call(options.timeout_s, scorer.score, batch)
            seconds = time.monotonic() - started
            if not SHORT_S <= seconds < LONG_S:
                num_rows = min(2 * num_rows, MOST_ROWS) if seconds < SHORT_S else LEAST_ROWS
            if scored.is_stuck:
                child.close()  # a hanging thread cannot be killed; the next batch starts a new process
            return scored
        except DeadlineError as error:
            raise DeadlineError(
                f"{rows} took longer than {options.timeout_s:g} s: look for what hangs there"
            ) from error
        except WorkerDiedError as error:
            reason = "it ran out of memory or was killed, try again with fewer processes"
            raise WorkerDiedError(f"{rows}: {error}; {reason}") from error
        finally:
            idle.put(child)

    pending: deque[Future[ScoredBatch]] = deque()
    with ThreadPoolExecutor(num_processes) as threads:
        try:
            for batch in source.batches(lambda: num_rows):
                pending.append(threads.submit(score, batch))
                if len(pending) > AHEAD * num_processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            for child in children:
                child.kill()  # ends the waits of the threads
    for child in children:
        child.close()
