"""ChatImages: images of model inputs, processed by the model's own processor."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from mobula.actors.datasets.images import EncodedFile
from mobula.actors.processors.chat import ChatProcessor
from mobula.deploy.training_service.wire.inputs import PlacedImage


class ChatImages:
    """Implements `ImagePlacer`. Called from several threads."""

    def __init__(self, chat: ChatProcessor, max_images: int) -> None:
        """`max_images` of one input is what the engines take."""
        self.max_images = max_images
        self._chat = chat
        self._lock = threading.Lock()

    def place(self, content: bytes, name: str) -> PlacedImage:
        """Processes an image, or finds it among the processed ones."""
        file = EncodedFile(content, name)
        with self._lock:
            self._chat.check_images([file], name)
            _, sizes = self._chat.read_images([file])
            expanded_ids = self._expanded(file, sizes, name)
            handle = self._chat.store_image(content, file)
        return PlacedImage(handle, self._placeholder_id, expanded_ids)

    def count(self, content: bytes, name: str) -> int:
        """Returns the number of tokens of an image, from the header of its file."""
        file = EncodedFile(content, name)
        return len(self._expanded(file, self._chat.image_sizes([file]), name))

    @property
    def _placeholder_id(self) -> int:
        placeholder_id = self._chat.image_token_id
        assert placeholder_id is not None, "a model that takes images has a placeholder"
        return placeholder_id

    def _expanded(self, file: EncodedFile, sizes: Sequence[tuple[int, int]], name: str) -> np.ndarray:
        """Returns int32 [E]: the tokens that stand for an image of this size."""
        _, [expanded_ids] = self._chat.expansions(np.array([self._placeholder_id]), [file], sizes, name)
        return expanded_ids
