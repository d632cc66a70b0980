"""Preparation of prompts in this process, one after the other; `actors.processors.pool` does it on workers."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from actors.datasets.prompts import failed


class Preparer(Protocol):
    """A processor: `ChatProcessor`, `ConversationProcessor` or `FlowProcessor`."""

    def prepare(self, row: Any, prompt_id: str) -> Any: ...


class InDriver:
    """Implements `actors.datasets.prompts.Preparation`: a prompt is prepared in the caller's thread as it is begun."""

    num_ahead = 1

    def __init__(self, processor: Preparer) -> None:
        self._processor = processor

    def begin(self, row: Any, prompt_id: str) -> Future[Any]:
        try:
            prompt = self._processor.prepare(row, prompt_id)
        except Exception as error:  # of a row, or one that ends the run: it is raised where the prompt is asked for
            return failed(error)
        begun: Future[Any] = Future()
        begun.set_result(prompt)
        return begun
