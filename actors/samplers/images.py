"""ImageSampler: base of the samplers that generate images."""

from __future__ import annotations

import asyncio
import io
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from mobula.actors.samplers.in_process import InProcessSampler
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, Emit, SampledSequence
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings


class ImageSampler(InProcessSampler):
    """Generates the siblings of a prompt in batches of at most `max_num_seqs`; with 0 all of them in one batch.

    An image is reported when its group is complete; an attempt after a loss starts from the beginning.
    """

    async def sample(
        self,
        prompt: Prompt,
        media: Sequence[ProcessedMedia],
        settings: SamplingSettings,
        attempt: Attempt,
        emit: Emit,
    ) -> list[SampledSequence]:
        async with self._serving(settings.min_version):
            sequences = await asyncio.to_thread(self._sample, prompt, media, settings)
            self._num_tokens += sum(sequence.num_tokens for sequence in sequences)
        return sequences

    @torch.no_grad()
    def _sample(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], settings: SamplingSettings
    ) -> list[SampledSequence]:
        siblings, most = range(settings.num_samples), self._settings.max_num_seqs or settings.num_samples
        parts = [siblings[start : start + most] for start in siblings[::most]]
        return [sequence for part in parts for sequence in self._made(prompt, media, settings, part)]

    @abstractmethod
    def _made(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], settings: SamplingSettings, siblings: Sequence[int]
    ) -> list[SampledSequence]:
        """Samples siblings on a thread, with one forward pass per step."""


def png(image: np.ndarray) -> bytes:
    """Encodes uint8 [H, W, 3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()
