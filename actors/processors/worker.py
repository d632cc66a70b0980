"""ProcessorWorker: prepares prompts in a process of its own; each processed medium is a returned value of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mobula.actors.processors.make import make_processor
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.media import MediaHandle, ProcessedMedia
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.configs.schema import RunConfig


@dataclass(frozen=True)
class Made:
    """Result of a worker for a row: its prompt, whose media have no references yet, or why there is none."""

    prompt: Prompt | ScoredGroup | None  # a group, for offline jobs
    reason: str = ""  # of a row that is unusable: a word to count by, and a sentence to act on
    detail: str = ""


class CallMedia:
    """Implements `cluster.records.media.MediaKeeper` for one call: media that the caller knows are not processed."""

    def __init__(self, known: frozenset[str] = frozenset()) -> None:
        """`known` are keys of media that the caller has."""
        self._known = known
        self._made: dict[str, ProcessedMedia] = {}

    def get_or_add(self, key: str, source: str, process: Callable[[], ProcessedMedia]) -> MediaHandle:
        if key in self._known:
            return MediaHandle(key, "", 0, None, source)
        if key not in self._made:
            self._made[key] = process()
        made = self._made[key]
        return MediaHandle(key, made.modality, made.num_bytes, None, source)

    def take(self, key: str) -> ProcessedMedia | None:
        """The medium of a key, once: it is None where it is known, and for each further place of it in a prompt."""
        return self._made.pop(key, None)


class _Keeper:
    """Keeps the media of the call in progress, which the processor stores."""

    call = CallMedia()

    def get_or_add(self, key: str, source: str, process: Callable[[], ProcessedMedia]) -> MediaHandle:
        return self.call.get_or_add(key, source, process)


class ProcessorWorker:
    """Reads, decodes and processes images and videos; one call at a time. It keeps nothing of a call."""

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(config.resources.processor.num_threads)
        self._media = _Keeper()
        self._processor = make_processor(config, self._media)

    def prepare(self, row: Any, prompt_id: str, known: frozenset[str]) -> list[Made | ProcessedMedia | None]:
        """The prompt of a row, then the medium of each of its handles, None for what `known` has and for repetitions.

        A row that cannot be used gives None for each of its media.
        """
        return [*self._made(row, prompt_id, known)]

    def prepare_text(self, row: Any, prompt_id: str) -> Made:
        """`prepare` of a row without media: a call with one result returns no list."""
        made, *_ = self._made(row, prompt_id, frozenset())
        return made

    def _made(self, row: Any, prompt_id: str, known: frozenset[str]) -> tuple[Made, *tuple[ProcessedMedia | None, ...]]:
        self._media.call = call = CallMedia(known)
        try:
            made = self._processor.prepare(row, prompt_id)
        except SkippedSample as error:
            return Made(None, error.reason, str(error)), *([None] * self._processor.num_media(row))
        return Made(made), *(call.take(handle.key) for handle in prompt_of(made).media)

    def ping(self) -> bool:
        """Answers once the worker is built and free."""
        return True

    def close(self) -> None:
        """Nothing to hand back: the process ends with its memory."""


def prompt_of(made: Prompt | ScoredGroup) -> Prompt:
    """The prompt itself, also of a row that an offline job trains on."""
    return made if isinstance(made, Prompt) else made.group.prompt
