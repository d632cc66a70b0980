"""Writes informative output (summary, report, plan, traces), whose failure does not end the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_logger = logging.getLogger(__name__)


@contextmanager
def informing(what: str) -> Iterator[None]:
    """Logs an error of the body, such as a full disk, with its traceback; `what` names the output."""
    try:
        yield
    except Exception:
        _logger.exception("%s could not be written; the run goes on without it", what)
