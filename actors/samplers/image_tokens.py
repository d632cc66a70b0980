"""Samplers of images as tokens, and what image samplers share."""

from __future__ import annotations

import asyncio
import io
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import DynamicCache, JanusForConditionalGeneration

from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.huggingface import InProcessSampler
from mobula.cluster.errors import RolloutError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, Emit, SampledSequence
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.seeds import derived_seed
from mobula.learner.policies.image_tokens import (
    canary_tokens,
    embedded,
    head_states,
    image_logits,
    num_image_tokens,
    without_text,
)
from mobula.learner.policies.loading import DTYPES, load_model


@dataclass(eq=False)
class ImageRequest:
    prompt: Prompt
    media: Sequence[ProcessedMedia]
    settings: SamplingSettings
    images: list[SampledSequence] | None = None  # once they are made

    @property
    def rows(self) -> list[ImageRow]:
        return [ImageRow(self, sibling) for sibling in range(self.settings.num_samples)]


@dataclass(frozen=True)
class ImageRow:
    request: ImageRequest
    sibling: int

    @property
    def generator(self) -> torch.Generator:
        """A new generator, which depends on the request's seed and the sibling alone."""
        return torch.Generator().manual_seed(derived_seed(self.request.settings.seed, str(self.sibling)))


class ImageSampler(InProcessSampler):
    """Generates images in batches of at most `max_num_seqs`; with 0 all siblings of one prompt in one batch. Prompts
    that wait for the engine share a batch, as far as it holds all their siblings and they are `kind_of` one kind. An
    image is reported when its batch is complete; an attempt after a loss starts from the beginning."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._waiting: list[ImageRequest] = []

    async def sample(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], settings: SamplingSettings, attempt: Attempt, emit: Emit
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


class ImageTokenSampler(ImageSampler):
    """Samples the siblings of a prompt as one batch, each with a separate generator."""

    _model: JanusForConditionalGeneration

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._guidance = settings.sampler.image_tokens.guidance

    async def start(self) -> None:
        model = await asyncio.to_thread(load_model, self._settings.model, DTYPES[self._settings.dtype], "sdpa")
        assert isinstance(model, JanusForConditionalGeneration)
        self._model = model.to(self._device).eval()  # type: ignore[arg-type]  # transformers: `to` is no method to mypy
        self._num_tokens_each = num_image_tokens(model.config)
        self._take_parameters()

    def _kind_of(self, request: ImageRequest) -> object:
        return request  # prompts differ in length

    def _made(self, rows: Sequence[ImageRow]) -> list[SampledSequence]:
        settings, generators = rows[0].request.settings, [row.generator for row in rows]
        ids = torch.from_numpy(rows[0].request.prompt.expanded_ids).long().to(self._device).expand(len(rows), -1)
        if self._guidance != 1:  # [2n, P, H]: the second half is the prompt without text
            ids = torch.cat([ids, without_text(self._model, ids)])
        inputs, cache = self._model.get_input_embeddings()(ids), DynamicCache()
        tokens, logprobs = [], []
        for _ in range(self._num_tokens_each):
            hidden = self._model.model.language_model(
                inputs_embeds=inputs, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
            logits = image_logits(self._model, head_states(self._model, hidden, self._guidance))  # [n, V]
            scores = (logits / (settings.temperature or 1.0)).log_softmax(-1).cpu()
            chosen = _chosen(scores, generators, is_greedy=settings.temperature == 0)  # [n]
            tokens.append(chosen)
            logprobs.append(scores.gather(-1, chosen[:, None])[:, 0])
            again = chosen.repeat(len(inputs) // len(rows))[:, None].to(self._device)
            inputs = self._model.prepare_embeddings_for_image_generation(again)
        drawn = torch.stack(tokens, 1)
        images = self._images(drawn.to(self._device))
        columns = zip(drawn.numpy(), torch.stack(logprobs, 1).numpy(), images, strict=True)
        return [self._sequence(*column) for column in columns]

    def _images(self, tokens: Tensor) -> np.ndarray:
        """Decodes image tokens to uint8 [n, H, W, 3]."""
        pixels = self._model.decode_image_tokens(tokens).float()  # in -1 .. 1
        return ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()

    def _sequence(self, tokens: np.ndarray, logprobs: np.ndarray, image: np.ndarray) -> SampledSequence:
        return SampledSequence(
            TokenActions(tokens.astype(np.int32)),
            logprobs.astype(np.float32),
            (WeightSpan(self._served.number, 0, len(tokens)),),
            FinishReason.STOP,
            (png(image),),
        )

    @torch.no_grad()
    def _prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        """Returns float32 [T], log-probs of arbitrary image tokens after the prompt."""
        tokens = canary_tokens(self._settings.model)
        ids = torch.cat([torch.from_numpy(prompt.expanded_ids).long(), tokens])[None].to(self._device)
        num = prompt.num_tokens
        is_text = torch.arange(ids.shape[1], device=self._device)[None] < num
        if self._guidance != 1:
            ids = torch.cat([ids, torch.where(is_text, without_text(self._model, ids), ids)])
            is_text = is_text.repeat(2, 1)
        embeds = embedded(self._model, ids, is_text)
        hidden = self._model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        states = head_states(self._model, hidden[:, num - 1 : -1].flatten(0, 1), self._guidance)
        return image_logits(self._model, states).log_softmax(-1).cpu().gather(-1, tokens[:, None])[:, 0].numpy()

    @torch.no_grad()
    def _work_a_little(self) -> None:
        ids = torch.tensor([[self._settings.pad_id]], device=self._device)
        self._model.model.language_model(inputs_embeds=self._model.get_input_embeddings()(ids), use_cache=False)


def _chosen(logprobs: Tensor, generators: Sequence[torch.Generator], *, is_greedy: bool) -> Tensor:
    """Samples one token per row; returns int64 [n]."""
    if is_greedy:
        return logprobs.argmax(-1)
    drawn = [torch.multinomial(row.exp(), 1, generator=g) for row, g in zip(logprobs, generators, strict=True)]
    return torch.cat(drawn)
