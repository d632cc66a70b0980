"""RepeatedEvents: logs events with the same cause within a short time as one line with a count."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass


@dataclass
class _Line:
    first: str
    plural: str
    count: int = 0


class RepeatedEvents:
    """Needs a running event loop.

    Example:
        events = RepeatedEvents(logger, window_s=1.0)
        for prompt in prompts:
            events.note("failed and are retried: no output", f"prompt {prompt}", "prompts")

    logs "64 prompts failed and are retried: no output (first: prompt 0/3/s3)" once, a second after the first of them.
    """

    def __init__(self, logger: logging.Logger, window_s: float) -> None:
        self._logger = logger
        self._window_s = window_s
        self._lines: dict[str, _Line] = {}  # by event

    def note(self, event: str, subject: str, plural: str) -> None:
        """Counts `event` of `subject`; `plural` names its kind in the log line."""
        if event not in self._lines:
            self._lines[event] = _Line(subject, plural)
            asyncio.get_running_loop().call_later(self._window_s, self._write, event)
        self._lines[event].count += 1

    def _write(self, event: str) -> None:
        line = self._lines.pop(event)
        self._logger.warning("%d %s %s (first: %s)", line.count, line.plural, event, line.first)
