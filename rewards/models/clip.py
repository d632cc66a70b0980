"""CLIP: similarity of images and a text, on a fixed scale (CLIPScore) or the learnt scale (PickScore).

CLIPScore (Hessel et al. 2021): w * max(cos(E_image, E_text), 0) with w = 2.5; others report 100 * cos. PickScore
(Kirstain et al. 2023): exp(logit_scale) * cos, with a CLIP trained on human preferences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, CLIPModel

from mobula.rewards.contract import Outcome, RewardRequest, Score
from mobula.rewards.models.batching import score_in_batches
from mobula.rewards.models.loading import load_processor, load_strictly, one_of, positive_int
from mobula.rewards.models.question import IMAGES_FROM, QuestionFinder, decoded_images
from mobula.rewards.tools import Tools

TEXTS_FROM = ("question", "response")


class ClipEmbedder:
    """Embeds images and texts with a CLIP checkpoint as unit vectors, float32 [N, projection]."""

    def __init__(self, model: str, processor: str | None, tools: Tools) -> None:
        self._processor: Any = load_processor(AutoProcessor, processor or model)
        self.model: Any = load_strictly(CLIPModel, model, tools)
        self.max_tokens = int(self.model.config.text_config.max_position_embeddings)
        self.learnt_scale = math.exp(float(self.model.get_parameter("logit_scale")))
        self._device = torch.device(tools.device)

    def embed_images(self, images: Sequence[Image.Image]) -> torch.Tensor:
        pixels = self._processor.image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        embeddings = self.model.get_image_features(pixel_values=pixels.to(self._device, self.model.dtype)).pooler_output
        return torch.nn.functional.normalize(embeddings.float(), dim=-1)

    def embed_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Embeds texts, truncated to `max_tokens`."""
        tokens = self._processor.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self._device)
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        embeddings = self.model.get_text_features(input_ids=ids, attention_mask=mask).pooler_output
        return torch.nn.functional.normalize(embeddings.float(), dim=-1)

    def num_tokens(self, text: str) -> int:
        return len(self._processor.tokenizer(text, verbose=False)["input_ids"])


@dataclass(frozen=True)
class _Pair:
    images: tuple[Image.Image, ...]
    text: str
    note: str


class ClipScore:
    """scale * cos(image, text), averaged over the images of a request.

    `model` is a CLIP checkpoint; `processor` another checkpoint with tokenizer and image processor, or null. `text` is
    question or response, `images` is prompt or response. `clamp` raises negative values to 0. Published CLIPScore is
    `scale` 2.5 with `clamp`; the common percentage is 100. `question_pattern`: see `QuestionFinder`. Of several images
    (frames of a video) every `frame_stride`-th is scored, starting with the first. Texts above CLIP's maximum length
    are truncated, which the reason of the score states.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        model: str,
        processor: str | None,
        scale: float,
        clamp: bool,
        text: str,
        images: str,
        question_pattern: str | None,
        batch_size: int,
        frame_stride: int = 1,
    ) -> None:
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0 or math.isinf(scale):
            raise ValueError(f"options.scale={scale!r} is no number above 0: use 100, 2.5 or 1")
        if not isinstance(clamp, bool):
            raise ValueError(f"options.clamp={clamp!r} is neither true nor false")
        self._in_time = tools.in_time
        self._scale = float(scale)
        self._clamp = clamp
        self._text = one_of("text", text, TEXTS_FROM)
        self._images = one_of("images", images, IMAGES_FROM)
        self._questions = QuestionFinder(question_pattern)
        self._batch_size = positive_int("batch_size", batch_size)
        self._frame_stride = positive_int("frame_stride", frame_stride)
        self._clip = ClipEmbedder(model, processor, tools)

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[float | Outcome]:
        """Returns one outcome per request."""
        return score_in_batches(
            requests,
            encode=self._encode,
            size=lambda pair: len(pair.images),
            score=self._score,
            batch_size=self._batch_size,
            in_time=self._in_time,
        )

    def _encode(self, request: RewardRequest) -> _Pair:
        text = request.response.text if self._text == "response" else self._questions.find(request)
        num_tokens, limit = self._clip.num_tokens(text), self._clip.max_tokens
        note = f"the text was cut from {num_tokens} to {limit} tokens" if num_tokens > limit else ""
        return _Pair(decoded_images(request, self._images, self._frame_stride), text, note)

    def _score(self, pairs: Sequence[_Pair]) -> list[Outcome]:
        texts = self._clip.embed_texts([pair.text for pair in pairs])  # [B, D]
        images = self._clip.embed_images([image for pair in pairs for image in pair.images])  # [images, D]
        outcomes: list[Outcome] = []
        for pair, text, own in zip(pairs, texts, images.split([len(pair.images) for pair in pairs]), strict=True):
            values = self._scale * (own @ text)
            values = values.clamp(min=0) if self._clamp else values
            outcomes.append(Score(float(values.mean()), pair.note))
        return outcomes


class PickScore(ClipScore):
    """exp(logit_scale) * cos(image, question), unclamped: `ClipScore` with the learnt scale of the checkpoint."""

    def __init__(
        self,
        tools: Tools,
        *,
        model: str,
        processor: str | None,
        images: str,
        question_pattern: str | None,
        batch_size: int,
        frame_stride: int = 1,
    ) -> None:
        super().__init__(
            tools,
            model=model,
            processor=processor,
            scale=1.0,
            clamp=False,
            text="question",
            images=images,
            question_pattern=question_pattern,
            batch_size=batch_size,
            frame_stride=frame_stride,
        )
        self._scale = self._clip.learnt_scale
