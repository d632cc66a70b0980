"""ImagePatchProcessor: prompts of models that draw images as continuous tokens, and images to learn from as tokens."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoTokenizer

from mobula.actors.processors.flow import TargetImages
from mobula.actors.processors.image_tokens import DrawingProcessor
from mobula.configs.schema import RunConfig
from mobula.learner.policies.flow.codec import ImageCodec
from mobula.learner.policies.flow.patches import codec_folder, grid_of, ids_of, model_config
from mobula.learner.policies.flow.policy import Denoising


class ImagePatchProcessor(DrawingProcessor, TargetImages):
    """Builds prompts of a text, the size of the image in tokens, and the token that opens an image."""

    def __init__(self, config: RunConfig) -> None:
        self._model = config.policy.model
        self._grid = grid_of(self._model, Denoising.of(config.sampler.flow).size)
        tokenizer = AutoTokenizer.from_pretrained(self._model, trust_remote_code=False)
        DrawingProcessor.__init__(self, tokenizer, self.num_tokens, config)
        TargetImages.__init__(self, config.data.path, config.sampler.flow)

    @property
    def num_tokens(self) -> int:
        """L: tokens of an image."""
        return self._grid.num_tokens

    def _ids(self, text: str) -> list[int]:
        return ids_of(self._tokenizer, self._model, text, self._grid)

    def _latent_shape(self) -> tuple[int, ...]:
        return (self.num_tokens, self._grid.size)

    def _encoded_pixels(self, pixels: np.ndarray) -> np.ndarray:
        with self._lock:
            if self._codec is None:
                side = model_config(self._model).latent_patch_size
                self._codec = ImageCodec(codec_folder(self._model), side, torch.float32)
            return self._codec.encode(pixels[None])[0].numpy()
