"""Scores of images by CLIP, PickScore and the aesthetic predictor."""

from __future__ import annotations

import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoProcessor, CLIPModel

from mobula.rewards.contract import Outcome, RewardRequest, Score
from mobula.rewards.models.loading import (
    IMAGES_FROM,
    QuestionFinder,
    decoded_images,
    existing_file,
    load_processor,
    load_strictly,
    one_of,
    positive_int,
    score_in_batches,
)
from mobula.rewards.tools import Tools

# CLIP: similarity of images and a text, on a fixed scale (CLIPScore) or the learnt scale (PickScore).
#
# CLIPScore (Hessel et al. 2021): w * max(cos(E_image, E_text), 0) with w = 2.5; others report 100 * cos. PickScore
# (Kirstain et al. 2023): exp(logit_scale) * cos, with a CLIP trained on human preferences.

TEXTS_FROM = ("question", "response")


class ClipEmbedder:
    """Embeds images and texts with a CLIP checkpoint as unit vectors, float32 [N, projection]."""

    def __init__(self, model: str, processor: str | None, tools: Tools) -> None:
        self._processor: Any = load_processor(AutoProcessor, processor or model)
        self.model: Any = load_strictly(CLIPModel, model, tools)
        self.max_tokens = int(self.model.config.text_config.max_position_embeddings)
        self.learnt_scale = math.exp(float(self.model.get_parameter("logit_scale")))
        self._device = torch.device(tools.device)

    def embed_batch(self, batch: Sequence[_Images]) -> Sequence[torch.Tensor]:
        """Embeds the images of each request, [images, D] each."""
        images = [image for one in batch for image in one.images]
        pixels = self._processor.image_processor(images=images, return_tensors="pt")["pixel_values"]
        embeddings = self.model.get_image_features(pixel_values=pixels.to(self._device, self.model.dtype)).pooler_output
        normalised = torch.nn.functional.normalize(embeddings.float(), dim=-1)
        return normalised.split([len(one.images) for one in batch])

    def embed_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Texts are truncated to `max_tokens`."""
        tokens = self._processor.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self._device)
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        embeddings = self.model.get_text_features(input_ids=ids, attention_mask=mask).pooler_output
        return torch.nn.functional.normalize(embeddings.float(), dim=-1)

    def num_tokens(self, text: str) -> int:
        return len(self._processor.tokenizer(text, verbose=False)["input_ids"])


@dataclass(frozen=True)
class _Images:
    """Images of one request, with the text that they are compared with."""

    images: tuple[Image.Image, ...]
    text: str = ""
    note: str = ""


@dataclass(eq=False)
class _ImageScorer(ABC):
    """Scores every `frame_stride`-th image of the prompt or of the response in batches of `batch_size` requests."""

    tools: Tools
    _: KW_ONLY
    model: str
    processor: str | None
    images: str
    batch_size: int
    frame_stride: int = 1

    def __post_init__(self) -> None:
        one_of("images", self.images, IMAGES_FROM)
        positive_int("batch_size", self.batch_size)
        positive_int("frame_stride", self.frame_stride)
        self._clip = ClipEmbedder(self.model, self.processor, self.tools)

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[float | Outcome]:
        return score_in_batches(
            requests,
            encode=self._encode,
            size=lambda encoded: len(encoded.images),
            score=self._score,
            batch_size=self.batch_size,
            in_time=self.tools.in_time,
        )

    def _encode(self, request: RewardRequest) -> _Images:
        return _Images(decoded_images(request, self.images, self.frame_stride))

    @abstractmethod
    def _score(self, batch: Sequence[_Images]) -> list[Outcome]: ...


@dataclass(eq=False, kw_only=True)
class ClipScore(_ImageScorer):
    """scale * cos(image, text), averaged over the images of a request.

    `model` is a CLIP checkpoint; `processor` another checkpoint with tokenizer and image processor, or null. `text` is
    question or response, `images` is prompt or response. `clamp` raises negative values to 0. Published CLIPScore is
    `scale` 2.5 with `clamp`; the common percentage is 100. `question_pattern`: see `QuestionFinder`. Of several images
    (frames of a video) every `frame_stride`-th is scored, starting with the first. Texts above CLIP's maximum length
    are truncated, which the reason of the score states.
    """

    scale: float
    clamp: bool
    text: str
    question_pattern: str | None

    def __post_init__(self) -> None:
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float) or not 0 < self.scale < math.inf:
            raise ValueError(f"options.scale={self.scale!r} is no number above 0: use 100, 2.5 or 1")
        if not isinstance(self.clamp, bool):
            raise ValueError(f"options.clamp={self.clamp!r} is neither true nor false")
        one_of("text", self.text, TEXTS_FROM)
        self._questions = QuestionFinder(self.question_pattern)
        super().__post_init__()

    def _encode(self, request: RewardRequest) -> _Images:
        text = request.response.text if self.text == "response" else self._questions.find(request)
        num_tokens, limit = self._clip.num_tokens(text), self._clip.max_tokens
        note = f"the text was cut from {num_tokens} to {limit} tokens" if num_tokens > limit else ""
        return replace(super()._encode(request), text=text, note=note)

    def _score(self, batch: Sequence[_Images]) -> list[Outcome]:
        texts = self._clip.embed_texts([one.text for one in batch])  # [B, D]
        outcomes: list[Outcome] = []
        for one, text, own in zip(batch, texts, self._clip.embed_batch(batch), strict=True):
            values = self.scale * (own @ text)
            values = values.clamp(min=0) if self.clamp else values
            outcomes.append(Score(float(values.mean()), one.note))
        return outcomes


@dataclass(eq=False)
class PickScore(ClipScore):
    """exp(logit_scale) * cos(image, question), unclamped: `ClipScore` with the learnt scale of the checkpoint."""

    scale: float = field(default=1.0, init=False)
    clamp: bool = field(default=False, init=False)
    text: str = field(default="question", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scale = self._clip.learnt_scale


# Aesthetic: a small network on CLIP's image embedding that predicts human ratings of an image, 1 to 10.
#
# Schuhmann (2022), "Improved Aesthetic Predictor": 768 -> 1024 -> 128 -> 64 -> 16 -> 1 without activations, with
# dropout in training, on the normalised embedding of CLIP ViT-L/14.

WIDTHS = (768, 1024, 128, 64, 16, 1)
_UNREADABLE = (SafetensorError, pickle.UnpicklingError, OSError, EOFError, RuntimeError, TypeError, AttributeError)
DROPOUTS = (0.2, 0.2, 0.1)  # after the first layers; inactive at inference, but counted in the names of the weights


class AestheticHead(nn.Module):
    """[N, 768] -> [N]; the layers have the numbers of the published weights."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number, (width, next_width) in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False)):
            layers.append(nn.Linear(width, next_width))
            if number < len(DROPOUTS):
                layers.append(nn.Dropout(DROPOUTS[number]))
        self.layers = nn.Sequential(*layers)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        return self.layers(embeddings).squeeze(-1)


@dataclass(eq=False, kw_only=True)
class Aesthetic(_ImageScorer):
    """The rating of the head, averaged over the images of a request.

    `model` is the CLIP checkpoint (ViT-L/14, whose projection has 768 dimensions), `processor` another checkpoint with
    the image processor or null, `head` the file with the head's weights (.safetensors, or .pth with tensors only),
    `images` is prompt or response. Of several images (frames of a video) every `frame_stride`-th is rated, starting
    with the first.
    """

    head: str

    def __post_init__(self) -> None:
        self._head = load_head(existing_file("head", self.head)).to(self.tools.device)
        super().__post_init__()
        model, width = self.model, self._clip.model.config.projection_dim
        if width != WIDTHS[0]:
            raise ValueError(
                f"options.model={model!r} projects to {width} dimensions, the head takes {WIDTHS[0]}: use CLIP ViT-L/14"
            )

    def _score(self, batch: Sequence[_Images]) -> list[Outcome]:
        embedded = self._clip.embed_batch(batch)
        ratings = self._head(torch.cat(list(embedded))).split([len(own) for own in embedded])
        return [Score(float(own.mean())) for own in ratings]


def load_head(file: Path) -> AestheticHead:
    """Loads the head from `file`, float32 and frozen."""
    try:
        weights = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        head = AestheticHead()
        head.load_state_dict(weights, strict=True)
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"options.head={str(file)!r} does not hold its weights ({reason}): use another") from error
    return head.eval().requires_grad_(False)
