"""ChatImages: images of model inputs, processed by the model's own processor."""

from __future__ import annotations

import threading

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
        """Processes an image, or finds it among the processed ones.

        Raises:
            SkippedSample: the image is unfit, or the model takes none.
        """
        file = EncodedFile(content, name)
        with self._lock:
            self._chat.check_images([file], name)
            placeholder_id = self._chat.image_token_id
            assert placeholder_id is not None, "a model that takes images has a placeholder"
            _, sizes = self._chat.read_images([file])
            _, [expanded_ids] = self._chat.expansions(np.array([placeholder_id]), [file], sizes, name)
            handle = self._chat.store_image(content, file)
        return PlacedImage(handle, placeholder_id, expanded_ids)
