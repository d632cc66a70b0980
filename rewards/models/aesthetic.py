"""Aesthetic: a small network on CLIP's image embedding that predicts human ratings of an image, 1 to 10.

Schuhmann (2022), "Improved Aesthetic Predictor": 768 -> 1024 -> 128 -> 64 -> 16 -> 1 without activations, with dropout
in training, on the normalised embedding of CLIP ViT-L/14.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from mobula.rewards.contract import Outcome, RewardRequest, Score
from mobula.rewards.models.batching import score_in_batches
from mobula.rewards.models.clip import ClipEmbedder
from mobula.rewards.models.loading import existing_file, one_of, positive_int
from mobula.rewards.models.question import IMAGES_FROM, decoded_images
from mobula.rewards.tools import Tools

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


class Aesthetic:
    """The rating of the head, averaged over the images of a request.

    `model` is the CLIP checkpoint (ViT-L/14, whose projection has 768 dimensions), `processor` another checkpoint with
    the image processor or null, `head` the file with the head's weights (.safetensors, or .pth with tensors only),
    `images` is prompt or response. Of several images (frames of a video) every `frame_stride`-th is rated, starting
    with the first.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        model: str,
        processor: str | None,
        head: str,
        images: str,
        batch_size: int,
        frame_stride: int = 1,
    ) -> None:
        self._in_time = tools.in_time
        self._images = one_of("images", images, IMAGES_FROM)
        self._batch_size = positive_int("batch_size", batch_size)
        self._frame_stride = positive_int("frame_stride", frame_stride)
        self._head = load_head(existing_file("head", head)).to(tools.device)
        self._clip = ClipEmbedder(model, processor, tools)
        width = self._clip.model.config.projection_dim
        if width != WIDTHS[0]:
            raise ValueError(
                f"options.model={model!r} projects to {width} dimensions, the head takes {WIDTHS[0]}: use CLIP ViT-L/14"
            )

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[float | Outcome]:
        """Returns one outcome per request."""
        return score_in_batches(
            requests,
            encode=self._encode,
            size=len,
            score=self._score,
            batch_size=self._batch_size,
            in_time=self._in_time,
        )

    def _encode(self, request: RewardRequest) -> tuple[Image.Image, ...]:
        return decoded_images(request, self._images, self._frame_stride)

    def _score(self, batch: Sequence[tuple[Image.Image, ...]]) -> list[Outcome]:
        ratings = self._head(self._clip.embed_images([image for images in batch for image in images]))
        return [Score(float(own.mean())) for own in ratings.split([len(images) for images in batch])]


def load_head(file: Path) -> AestheticHead:
    """Loads the head from `file`, float32 and frozen.

    Raises:
        ValueError: the file does not hold exactly the head's tensors.
    """
    try:
        weights = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        head = AestheticHead()
        head.load_state_dict(weights, strict=True)
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"options.head={str(file)!r} does not hold its weights ({reason}): use another") from error
    return head.eval().requires_grad_(False)
