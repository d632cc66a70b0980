"""Model inputs of the client as prompts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mobula.actors.datasets.images import EncodedFile
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.media import MediaHandle, MediaSpan
from mobula.cluster.records.trajectory import Prompt
from mobula.deploy.training_service.tenants import RequestError

if TYPE_CHECKING:  # they load transformers
    from mobula.actors.processors.chat import ChatProcessor
    from mobula.learner.policies.families.base import Size


@dataclass(frozen=True)
class TextChunk:
    token_ids: np.ndarray  # int32 [T]


@dataclass(frozen=True)
class ImageChunk:
    """An encoded image file. `expected_tokens` is the client's own count, if it has one."""

    content: bytes
    expected_tokens: int | None = None


Chunk = TextChunk | ImageChunk


@dataclass(frozen=True)
class PlacedImage:
    handle: MediaHandle
    placeholder_id: int  # its one token in the compact ids
    expanded_ids: np.ndarray  # int32 [E]


class ChatImages:
    """Images by the model's own processor, in several threads. Methods raise SkippedSample for an unfit image."""

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


class InputBuilder:
    """Builds prompts from chunks. `max_tokens` bounds an expanded sequence."""

    def __init__(self, images: ChatImages | None, *, num_embeddings: int, max_tokens: int) -> None:
        self._images = images
        self._num_embeddings = num_embeddings
        self.max_tokens = max_tokens

    def build(self, chunks: Sequence[Chunk], name: str) -> Prompt:
        num_images = sum(isinstance(chunk, ImageChunk) for chunk in chunks)
        if num_images and self._images is None:
            raise RequestError(f"{name} has {num_images} images, and the model takes no images")
        if self._images is not None and num_images > self._images.max_images:
            raise RequestError(
                f"{name} has {num_images} images, and the service takes {self._images.max_images} "
                "(sampler.max_images_per_prompt): leave some out"
            )
        compact: list[np.ndarray] = []
        expanded: list[np.ndarray] = []
        media: list[MediaHandle] = []
        spans: list[MediaSpan] = []
        length = 0
        for chunk in chunks:
            if isinstance(chunk, TextChunk):
                ids = self._checked(chunk.token_ids, name)
                compact.append(ids)
            else:
                placed = self._placed(chunk, name)
                ids = placed.expanded_ids
                compact.append(np.array([placed.placeholder_id], dtype=np.int32))
                media.append(placed.handle)
                spans.append(MediaSpan(length, length + len(ids)))
            expanded.append(ids)
            length += len(ids)
        if not 0 < length <= self.max_tokens:
            raise RequestError(f"{name} has {length} tokens, 1 to {self.max_tokens} are allowed")
        return Prompt(
            prompt_id=name,
            sample_id=name,
            text="",
            compact_ids=np.concatenate(compact),
            expanded_ids=np.concatenate(expanded),
            media=tuple(media),
            media_spans=tuple(spans),
        )

    def count(self, chunk: Chunk) -> int:
        """Returns the number of tokens of a chunk, without processing an image."""
        if isinstance(chunk, TextChunk):
            return len(chunk.token_ids)
        if chunk.expected_tokens is not None:
            return chunk.expected_tokens
        if self._images is None:
            raise RequestError("the model takes no images")
        try:
            return self._images.count(chunk.content, "a row")
        except SkippedSample as error:
            raise RequestError(str(error)) from error

    def checked_targets(self, ids: np.ndarray, name: str) -> np.ndarray:
        """Returns int64 [N]. Raises: RequestError: a target is no token of the model."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._num_embeddings:
            raise RequestError(f"{name}: target_tokens has a token outside of 0 to {self._num_embeddings - 1}")
        return ids.astype(np.int64, copy=False)

    def _checked(self, ids: np.ndarray, name: str) -> np.ndarray:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._num_embeddings:
            raise RequestError(
                f"{name} has a token outside of 0 to {self._num_embeddings - 1}: use the tokenizer of get_tokenizer()"
            )
        return ids.astype(np.int32, copy=False)

    def _placed(self, chunk: ImageChunk, name: str) -> PlacedImage:
        assert self._images is not None, "the caller has checked it"
        try:
            placed = self._images.place(chunk.content, name)
        except SkippedSample as error:
            raise RequestError(str(error)) from error
        if chunk.expected_tokens not in (None, len(placed.expanded_ids)):
            raise RequestError(
                f"{name} expects {chunk.expected_tokens} tokens of an image, and the model's processor makes "
                f"{len(placed.expanded_ids)}: leave expected_tokens out, or count with the model's own processor"
            )
        return placed
