"""Builds the processor of a configuration, also in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.conversation import ConversationProcessor
from mobula.actors.processors.image_tokens import DrawingProcessor, ImageTokenProcessor
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.media import MediaHandle, MediaKeeper, ProcessedMedia
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.user_code import chosen
from mobula.configs.schema import RunConfig

if TYPE_CHECKING:
    from mobula.actors.processors.flow import FlowProcessor, ImagePairProcessor


def make_processor(
    config: RunConfig, media: MediaKeeper
) -> ChatProcessor | ConversationProcessor | FlowProcessor | ImagePairProcessor | DrawingProcessor:
    """Builds the processor that turns rows into prompts (offline jobs: into groups). Media are stored in `media`."""
    if config.sampler.is_flow:
        from mobula.actors.processors.flow import FlowProcessor, ImagePairProcessor  # imports diffusers

        flow = FlowProcessor.of(config, media)
        return ImagePairProcessor(flow) if config.offline.is_on else flow
    if config.sampler.draws_patches:
        from mobula.actors.processors.image_patches import ImagePatchProcessor  # imports diffusers

        return ImagePatchProcessor(config)
    if config.sampler.draws_tokens:
        return ImageTokenProcessor(config)
    chat = processor_maker(config)(config, media)
    if not config.offline.is_on:
        return chat
    return ConversationProcessor(
        chat,
        system_prompt=config.data.system_prompt,
        max_tokens=config.offline.max_tokens,
        has_tail=config.offline.job == "reward_model",
        trains_template=config.offline.train_template_text,
    )


def processor_maker(config: RunConfig) -> Callable[[RunConfig, MediaKeeper], ChatProcessor]:
    """Returns the factory of the processor that `data.processor` names."""
    given = ("config", "media")
    return chosen(
        {"chat": ChatProcessor.of}, config.data.processor, "data.processor", given, config.data.processor_options
    )


@dataclass(frozen=True)
class Made:
    """Result of a worker for a row: the prompt, with media without references, or the reason that there is none."""

    prompt: Prompt | ScoredGroup | None  # a group, for offline jobs
    reason: str = ""  # name of the counter, if the row is unusable
    detail: str = ""  # message for the user


class CallMedia:
    """Implements `cluster.records.media.MediaKeeper` for one call after the other; processes no media of the caller."""

    def __init__(self) -> None:
        self.begin(frozenset())

    def begin(self, known: frozenset[str]) -> None:
        """Begins a call; the caller has the media with the keys `known`."""
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
        """Removes and returns the medium of a key; None if the caller has it or it was taken before."""
        return self._made.pop(key, None)


class ProcessorWorker:
    """Reads, decodes and processes media; one call at a time."""

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(config.resources.processor.num_threads)
        self._media = CallMedia()
        self._processor = make_processor(config, self._media)

    def prepare(self, row: Any, prompt_id: str, known: frozenset[str]) -> list[Made | ProcessedMedia | None]:
        """Returns the prompt of a row, then one medium for each handle: None if it is in `known`, repeated, or the row
        cannot be used."""
        return [*self._made(row, prompt_id, known)]

    def prepare_text(self, row: Any, prompt_id: str) -> Made:
        """`prepare` for rows without media: Ray does not unpack a list with one result."""
        made, *_ = self._made(row, prompt_id, frozenset())
        return made

    def _made(self, row: Any, prompt_id: str, known: frozenset[str]) -> tuple[Made, *tuple[ProcessedMedia | None, ...]]:
        self._media.begin(known)
        try:
            made = self._processor.prepare(row, prompt_id)
        except SkippedSample as error:
            return Made(None, error.reason, str(error)), *([None] * self._processor.num_media(row))
        return Made(made), *(self._media.take(handle.key) for handle in prompt_of(made).media)

    def ping(self) -> bool:
        """Returns once the worker is built and idle."""
        return True

    def close(self) -> None:
        """Does nothing: the worker holds no resources outside its process."""


def prompt_of(made: Prompt | ScoredGroup) -> Prompt:
    """The prompt, also if it is part of an offline group."""
    return made if isinstance(made, Prompt) else made.group.prompt
