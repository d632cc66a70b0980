"""Suspects: limits the prompts that may have crashed engines, and excludes a prompt that is the cause."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from mobula.cluster.errors import EngineDiedError, ExcludedPromptError, RestartLoopError, WorkerDiedError
from mobula.cluster.failures import Failure
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.workers.fault_patterns import MAX_PUSHES, AfterPushes, Death, FaultPatterns, OnePrompt
from mobula.cluster.workers.faults import cause_of

_logger = logging.getLogger(__name__)


class Suspects:
    """Admits prompts to engines. After each death of an engine it holds suspects back and excludes proven causes.

    Example:
        async with suspects.admitted(prompt):
            return await engine.generate(prompt, settings)
        ...
        finding = suspects.engine_died(error, num_pushes, in_flight)    # an error that ends the run, or None
    """

    def __init__(self, on_excluded: Callable[[Prompt, ExcludedPromptError], None]) -> None:
        """`on_excluded` is called once for each excluded prompt."""
        self._on_excluded = on_excluded
        self._patterns = FaultPatterns()
        self._excluded: dict[tuple[str, str], ExcludedPromptError] = {}
        self._num_in_flight: Counter[str] = Counter()  # prompt id -> calls
        self._waiting: Counter[str] = Counter()
        self._changed = asyncio.Event()  # set, and replaced, whenever a suspect may go on

    @asynccontextmanager
    async def admitted(self, prompt: Prompt) -> AsyncIterator[None]:
        """Waits until the prompt may go to an engine, and counts it as in flight while the body runs.

        A suspect waits for earlier suspects. Each has a deadline.

        Raises:
            ExcludedPromptError: the prompt crashed several engines, in this or an earlier epoch.
        """
        self._refuse_if_excluded(prompt)
        self._waiting[prompt.prompt_id] += 1
        try:
            # Few suspects at a time: if an engine dies again, fewer prompts can be the cause.
            while self._must_wait(prompt.prompt_id):
                await self._changed.wait()
                self._refuse_if_excluded(prompt)
        finally:
            self._waiting -= Counter([prompt.prompt_id])
        self._num_in_flight[prompt.prompt_id] += 1
        try:
            yield
            self._patterns.finished(prompt.prompt_id)
        finally:
            self._num_in_flight -= Counter([prompt.prompt_id])
            self._notify()

    def engine_died(self, error: Exception, num_pushes: int, in_flight: dict[str, Prompt]) -> RestartLoopError | None:
        """Records a death. A finding excludes a prompt, or is returned as the error that ends the run."""
        failure = error.failure if isinstance(error, EngineDiedError | WorkerDiedError) else None
        failure = failure or Failure(cause_of(error))
        finding = self._patterns.died(Death(failure.fingerprint, num_pushes, frozenset(in_flight)))
        if isinstance(finding, OnePrompt):
            self._exclude(in_flight[finding.prompt_id], finding, failure)
        self._notify()
        if isinstance(finding, AfterPushes):
            return RestartLoopError(
                f"{finding.num_deaths} engines in a row died within {MAX_PUSHES} weight pushes after their start, with "
                f"the same cause: {failure}. A restart does not help, so the run ends before "
                "supervision.max_restarts is reached. Look for the cause in the engine or its settings (sampler.*, "
                "weight_sync.kv_cache), then go on with resume=auto"
            )
        return None

    def _exclude(self, prompt: Prompt, finding: OnePrompt, failure: Failure) -> None:
        error = ExcludedPromptError(
            f"prompt {prompt.prompt_id} (sample {prompt.sample_id}) is excluded: it was in flight at each of "
            f"{finding.num_deaths} deaths of engines with the same cause: {failure}"
        )
        self._excluded[_row(prompt)] = error
        _logger.warning("%s; the run continues without it", error)
        self._on_excluded(prompt, error)

    def _refuse_if_excluded(self, prompt: Prompt) -> None:
        if (error := self._excluded.get(_row(prompt))) is not None:
            raise ExcludedPromptError(str(error))

    def _must_wait(self, prompt_id: str) -> bool:
        limit = self._patterns.max_suspects_in_flight
        if limit is None:
            return False
        if not self._patterns.is_suspect(prompt_id):
            return self._patterns.run_alone and self._num_suspects(self._num_in_flight + self._waiting) > 0
        if self._patterns.run_alone:
            return self._num_in_flight.total() > 0
        return self._num_suspects(self._num_in_flight) >= limit

    def _num_suspects(self, calls: Counter[str]) -> int:
        return sum(num for prompt_id, num in calls.items() if self._patterns.is_suspect(prompt_id))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _row(prompt: Prompt) -> tuple[str, str]:
    """Identifies the data row of a prompt in every epoch: training prompts are numbered, others name their split."""
    split = prompt.prompt_id.partition("/")[0]
    return ("" if split.isdigit() else split, prompt.sample_id)
