"""ImageTokenSampler: draws images token by token with a model of transformers, under classifier-free guidance."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, JanusForConditionalGeneration

from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.images import ImageRequest, ImageRow, ImageSampler, png
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import SampledSequence
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.learner.policies.image_tokens.guidance import (
    canary_tokens,
    embedded,
    head_states,
    image_logits,
    num_image_tokens,
    without_text,
)
from mobula.learner.policies.loading import DTYPES, load_model


class ImageTokenSampler(ImageSampler):
    """Samples the siblings of a prompt as one batch, each with a separate generator."""

    _model: JanusForConditionalGeneration

    def __init__(self, settings: EngineSettings, guidance: float) -> None:
        super().__init__(settings)
        self._guidance = guidance

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
        inputs, cache = self._prompt_embeds(rows[0].request.prompt, len(rows)), DynamicCache()
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

    def _prompt_embeds(self, prompt: Prompt, num: int) -> Tensor:
        """Returns float [n, P, H], or with guidance [2n, P, H]; the second half is the prompt without text."""
        ids = torch.from_numpy(prompt.expanded_ids).long().to(self._device).expand(num, -1)
        if self._guidance != 1:
            ids = torch.cat([ids, without_text(self._model, ids)])
        return self._model.get_input_embeddings()(ids)

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
        logprobs = image_logits(self._model, states).log_softmax(-1).cpu()
        return logprobs.gather(-1, tokens[:, None])[:, 0].numpy()

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
