"""ImageSampler: base of the samplers that generate images."""

from __future__ import annotations

import asyncio
import io
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.in_process import InProcessSampler
from mobula.cluster.errors import RolloutError
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, Emit, SampledSequence
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.seeds import derived_seed


@dataclass(eq=False)
class ImageRequest:
    """A prompt whose images are asked for."""

    prompt: Prompt
    media: Sequence[ProcessedMedia]
    settings: SamplingSettings
    images: list[SampledSequence] | None = None  # once they are made

    @property
    def rows(self) -> list[ImageRow]:
        return [ImageRow(self, sibling) for sibling in range(self.settings.num_samples)]


@dataclass(frozen=True)
class ImageRow:
    """One image of a request."""

    request: ImageRequest
    sibling: int

    @property
    def generator(self) -> torch.Generator:
        """A new generator, which depends on the request's seed and the sibling alone."""
        return torch.Generator().manual_seed(derived_seed(self.request.settings.seed, str(self.sibling)))


class ImageSampler(InProcessSampler):
    """Generates images in batches of at most `max_num_seqs`; with 0 all siblings of one prompt in one batch.

    Prompts that wait for the engine share a batch, as far as it holds all their siblings and they are `kind_of` one
    kind. An image is reported when its batch is complete; an attempt after a loss starts from the beginning.
    """

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._waiting: list[ImageRequest] = []

    async def sample(
        self,
        prompt: Prompt,
        media: Sequence[ProcessedMedia],
        settings: SamplingSettings,
        attempt: Attempt,
        emit: Emit,
    ) -> list[SampledSequence]:
        request = ImageRequest(prompt, media, settings)
        self._waiting.append(request)
        try:
            await asyncio.sleep(0)  # prompts that arrive at the same time share a batch
            async with self._serving(settings.min_version):
                if request.images is None:
                    await asyncio.to_thread(self._sample, self._batch_with(request))
        finally:
            self._waiting.remove(request)
        assert request.images is not None, "a batch sets the images of all its requests"
        self._num_tokens += sum(sequence.num_tokens for sequence in request.images)
        return request.images

    def _batch_with(self, first: ImageRequest) -> list[ImageRequest]:
        """Returns `first` and the requests that wait with it and fit into one batch."""
        batch, num = [first], first.settings.num_samples
        for other in self._waiting:
            is_ready = other.images is None and other.settings.min_version <= self._served.number
            fits = num + other.settings.num_samples <= self._settings.max_num_seqs
            if other is not first and is_ready and fits and self._kind_of(other) == self._kind_of(first):
                batch.append(other)
                num += other.settings.num_samples
        return batch

    @torch.no_grad()
    def _sample(self, batch: Sequence[ImageRequest]) -> None:
        """Sets the images of all requests; of the first alone if a batch of several fails, so that the error of a
        prompt is its own."""
        rows = [row for request in batch for row in request.rows]
        most = self._settings.max_num_seqs or len(rows)
        try:
            made = [image for start in range(0, len(rows), most) for image in self._made(rows[start : start + most])]
        except RolloutError:
            if len(batch) == 1:
                raise
            return self._sample(batch[:1])
        images = iter(made)
        for request in batch:
            request.images = [next(images) for _ in request.rows]

    @abstractmethod
    def _kind_of(self, request: ImageRequest) -> object:
        """Returns what requests of one batch have in common."""

    @abstractmethod
    def _made(self, rows: Sequence[ImageRow]) -> list[SampledSequence]:
        """Samples images of requests of one kind on a thread, with one forward pass per step."""


def png(image: np.ndarray) -> bytes:
    """Encodes uint8 [H, W, 3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()
