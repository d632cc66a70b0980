"""Prompts and preference pairs of flow models."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mobula.actors.datasets.conversations import CHOSEN, REJECTED, ImagePair
from mobula.actors.datasets.media import path_below
from mobula.actors.datasets.rows import Row
from mobula.actors.processors.conversation import given_trajectory
from mobula.cluster.errors import PromptError
from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.markup import plain
from mobula.cluster.records.media import FORMATS, MediaHandle, MediaKeeper, ProcessedMedia, content_key, to_rgb
from mobula.cluster.records.trajectory import NO_IDS, Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.configs.schema import DataConfig, RunConfig
from mobula.configs.schema.rollout import FlowConfig
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.policy import CONDITION, WHERE, Denoising
from mobula.learner.policies.trained import flow_checkpoint

TARGETS = "target_images"  # key of a row's metadata: files of images that fit the prompt
MAX_IMAGES = 4096  # cached latents
logger = logging.getLogger(__name__)


class TargetImages(ABC):
    """Reads the images that rows name to learn from."""

    def __init__(self, root: Path, flow: FlowConfig) -> None:
        """`root` is `data.path`."""
        self._root = root.resolve()
        self._flow = flow
        self._lock = threading.Lock()
        self._codec: Any = None  # loaded on first use

    @abstractmethod
    def _latent_shape(self) -> tuple[int, ...]:
        """Returns the shape of the latents of an image."""

    @abstractmethod
    def _encoded_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Returns the latents, float32 [...], of an image, uint8 [H, W, 3]."""

    def clean(self, prompt: Prompt, choice: int) -> np.ndarray:
        """Returns the latents, float32 [...], of target image `choice` (modulo their number)."""
        names = prompt.metadata.get(TARGETS)
        if not isinstance(names, list | tuple) or not names:
            raise PromptError(
                f"{prompt.sample_id} names no images to learn from: write {TARGETS}, a list of files below "
                "data.path, into its metadata, or set warm_start=none"
            )
        name = str(names[choice % len(names)])
        path = path_below(self._root, name)
        if path is None:
            raise PromptError(f"{prompt.sample_id}: {name} of {TARGETS} is not below data.path={self._root}")
        return self.latents(path)

    def latents(self, path: Path) -> np.ndarray:
        """Reads latents, float32 [...], from a NumPy file, or encodes an image."""
        if path.suffix != ".npy":
            return self._encoded_image(path)
        try:
            latents = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise PromptError(f"{path} cannot be read as latents: {error}") from error
        shape = self._latent_shape()
        if latents.shape != shape or not np.isfinite(latents).all():
            raise PromptError(
                f"{path} has latents of shape {latents.shape}, finite or not, and those of this run are finite and "
                f"{shape}: encode the image again, or set sampler.flow.width and height"
            )
        return latents.astype(np.float32)

    @lru_cache(maxsize=MAX_IMAGES)  # noqa: B019 - one processor a run
    @torch.no_grad()
    def _encoded_image(self, path: Path) -> np.ndarray:
        if self._flow.num_frames > 1:
            raise PromptError(
                f"{path} is one image, and a video of this run has sampler.flow.num_frames={self._flow.num_frames}: "
                "name a .npy file with the latents of a video, or set sampler.flow.num_frames=1"
            )
        size = (self._flow.width, self._flow.height)
        try:
            with Image.open(path, formats=FORMATS) as opened:
                pixels = np.asarray(to_rgb(opened))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise PromptError(f"{path} cannot be read as an image: {error}") from error
        if pixels.shape[1::-1] != size:
            raise PromptError(
                f"{path} is {pixels.shape[1]} x {pixels.shape[0]}, and images of this run are {size[0]} x {size[1]}: "
                "scale it, or set sampler.flow.width and height"
            )
        return self._encoded_pixels(pixels)


class FlowProcessor(TargetImages):
    """Encodes texts with the encoders of a checkpoint, on the CPU of this process; each text once. A prompt has no
    tokens. `media` are the embeddings of the text and, with guidance, of the negative prompt."""

    takes_images = False
    media_token_ids: tuple[int, ...] = ()  # no tokens are sampled
    template_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id = 0

    @classmethod
    def of(cls, config: RunConfig, media: MediaKeeper) -> FlowProcessor:
        return cls(flow_checkpoint(config), config.data, config.sampler.flow, media, config.question_suffix)

    def __init__(
        self, checkpoint: FlowCheckpoint, data: DataConfig, flow: FlowConfig, media: MediaKeeper, suffix: str = ""
    ) -> None:
        """`suffix` is appended to every prompt."""
        super().__init__(data.path, flow)
        self._checkpoint = checkpoint
        self._family = checkpoint.family
        self._pipeline: Any = checkpoint.encoder()
        self._suffix = suffix
        self.takes_negatives = checkpoint.takes_negatives(flow.guidance)
        self._media = media
        self._num_cut = 0
        logging.getLogger(type(self._pipeline).__module__).addFilter(_is_not_about_a_cut_text)
        self.fingerprint = f"{checkpoint.encoder_fingerprint()} {flow.max_text_tokens}"

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        """Builds the prompt of a row. Encodes and stores the text."""
        self.check(row)
        text = self.prompt_text(row)
        negatives = (self._condition(self._flow.negative_prompt),) if self.takes_negatives else ()
        media = (self._condition(text), *negatives)
        spans, metadata = (WHERE,) * len(media), row.metadata
        return Prompt(prompt_id, row.sample_id, text, NO_IDS, NO_IDS, media, spans, row.references, metadata)

    def prompt_text(self, row: Row) -> str:
        return plain(row.question) + self._suffix

    def check(self, row: Row) -> int:
        """0: a prompt has no tokens."""
        if row.images or row.history or row.template:
            raise PromptError(
                f"{row.sample_id} has {len(row.images)} images and {len(row.history)} turns before the question: a "
                "flow model takes one text, so remove the row"
            )
        if not self.prompt_text(row).strip():
            raise PromptError(f"{row.sample_id} has no text: write what the image shows, or remove the row")
        return 0

    def num_media(self, row: Row) -> int:
        return 1 if self._flow.guidance == 1 else 2

    def _latent_shape(self) -> tuple[int, ...]:
        return self._checkpoint.latent_shape(Denoising.of(self._flow))

    def _encoded_pixels(self, pixels: np.ndarray) -> np.ndarray:
        with self._lock:
            if self._codec is None:
                self._codec = self._checkpoint.vae(torch.float32)
            return self._family.encode_images(self._codec, pixels[None])[0].float().numpy()

    def _condition(self, text: str) -> MediaHandle:
        key = content_key(text.encode(), self.fingerprint)
        return self._media.get_or_add(key, f"the text {text!r}", lambda: self._encoded(text))

    @torch.no_grad()
    def _encoded(self, text: str) -> ProcessedMedia:
        limit = self._flow.max_text_tokens
        with self._lock:
            encoded = self._family.encode(self._pipeline, text, limit)
            self._report(text, self._family.num_cut(self._pipeline, text, limit))
        return ProcessedMedia(CONDITION, {k: np.ascontiguousarray(t.float().numpy()) for k, t in encoded.items()})

    def _report(self, text: str, num_cut: int) -> None:
        """Logs the first, second, fourth, eighth, ... truncated text."""
        if num_cut == 0:
            return
        self._num_cut += 1
        if self._num_cut.bit_count() == 1:
            logger.warning(
                "texts that are longer than the text encoders read, and whose ends are left out: %d so far, the last "
                "one by %d tokens: %.200r. Set sampler.flow.max_text_tokens=%d or more, if the model takes so many",
                self._num_cut,
                num_cut,
                text,
                self._flow.max_text_tokens + num_cut,
            )


def _is_not_about_a_cut_text(record: logging.LogRecord) -> bool:
    """Filters a warning of pipelines about each text and encoder, even if another encoder reads the whole text.
    `_report` logs texts that no encoder reads whole."""
    return not record.getMessage().startswith("The following part of your input was truncated")


class ImagePairProcessor:
    """Builds a group from each row: two trajectories of one step that ends in an image; rewards are the labels.
    `behavior_logprobs` are 0, because no policy sampled the images."""

    media_token_ids: tuple[int, ...] = ()
    template_token_ids: tuple[int, ...] = ()

    def __init__(self, flow: FlowProcessor) -> None:
        self._flow = flow

    def prepare(self, row: ImagePair, prompt_id: str) -> ScoredGroup:
        prompt = self._flow.prepare(_asked(row), prompt_id)
        paths = (row.chosen, row.rejected)
        trajectories = tuple(
            given_trajectory(f"{prompt_id}#{n}", LatentActions.of_image(self._flow.latents(path)), np.ones(1, bool), "")
            for n, path in enumerate(paths)
        )
        group = TrajectoryGroup(prompt, trajectories)
        return ScoredGroup(group.summary(), group, (Reward(CHOSEN), Reward(REJECTED)))

    def num_media(self, row: ImagePair) -> int:
        return self._flow.num_media(_asked(row))

    def check(self, row: ImagePair) -> int:
        for path in (row.chosen, row.rejected):
            self._flow.latents(path)
        return self._flow.check(_asked(row))


def _asked(row: ImagePair) -> Row:
    return Row(row.sample_id, row.question, "", "")
