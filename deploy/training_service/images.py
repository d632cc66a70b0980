"""Images of model inputs, processed by the model's own processor."""

from __future__ import annotations

import threading

import numpy as np

from mobula.actors.datasets.images import EncodedFile
from mobula.actors.processors.chat import ChatProcessor
from mobula.deploy.training_service.inputs import PlacedImage
from mobula.learner.policies.families.base import Size


class ChatImages:
    """Implements `ImagePlacer`. Called from several threads."""

    def __init__(self, chat: ChatProcessor, max_images: int) -> None:
        self.max_images = max_images
        self._images = chat.images
        assert self._images.placeholder_id is not None, "a model that takes images has a placeholder"
        self._placeholder_id: int = self._images.placeholder_id
        self._lock = threading.Lock()

    def place(self, content: bytes, name: str) -> PlacedImage:
        file = EncodedFile(content, name)
        with self._lock:
            self._images.check([file], name)
            loaded = self._images.load(file)
            expanded_ids = self._expanded(file, loaded.measure, name)
            handle = self._images.store(loaded)
        return PlacedImage(handle, self._placeholder_id, expanded_ids)

    def count(self, content: bytes, name: str) -> int:
        file = EncodedFile(content, name)
        return len(self._expanded(file, self._images.measure(file), name))

    def _expanded(self, file: EncodedFile, size: Size, name: str) -> np.ndarray:
        """Returns int32 [E]: the tokens that stand for an image of this size."""
        _, [expanded_ids] = self._images.expansions(np.array([self._placeholder_id]), [file], [size], name)
        return expanded_ids
