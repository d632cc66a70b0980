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
from PIL import Image, ImageOps

from mobula.actors.datasets.conversations import CHOSEN, REJECTED, ImagePair
from mobula.actors.datasets.media import ImageSource, fetch_together, path_below
from mobula.actors.datasets.rows import IMAGE_PLACEHOLDER, Row
from mobula.actors.processors.conversation import given_trajectory
from mobula.actors.processors.media import LoadedMedium, check_image, decode_image, load_image
from mobula.actors.processors.modality import thumbnail
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
MAX_CONDITIONS = 16  # cached conditions of prompts, which negative prompts share
ConditionImage = LoadedMedium[ImageSource, tuple[int, int]]
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
    """Encodes texts and condition images with the encoders of a checkpoint, on the CPU of this process; each pair of
    them once. A prompt has no tokens. `media` are the encoded text and images and, with guidance, those of the negative
    prompt. The first also has the image files if a reward function reads them, and a thumbnail."""

    takes_images = False
    media_token_ids: tuple[int, ...] = ()  # no tokens are sampled
    template_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id = 0

    @classmethod
    def of(cls, config: RunConfig, media: MediaKeeper) -> FlowProcessor:
        keeps_files, flow = config.rewards.needs_images, config.sampler.flow
        return cls(flow_checkpoint(config), config.data, flow, media, config.question_suffix, keeps_files=keeps_files)

    def __init__(
        self,
        checkpoint: FlowCheckpoint,
        data: DataConfig,
        flow: FlowConfig,
        media: MediaKeeper,
        suffix: str = "",
        *,
        keeps_files: bool = False,
    ) -> None:
        """`suffix` is appended to every prompt; `keeps_files` stores the files of condition images."""
        super().__init__(data.path, flow)
        self._data = data
        self._keeps_files = keeps_files
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
        """Builds the prompt of a row. Encodes and stores the text and the condition images."""
        self.check(row)
        text = self.prompt_text(row)
        fetch_together(row.images)
        images = tuple(load_image(source, self._data) for source in row.images)
        negatives = (self._condition(self._flow.negative_prompt, images, is_first=False),) * self.takes_negatives
        media = (self._condition(text, images, is_first=True), *negatives)
        spans, metadata = (WHERE,) * len(media), row.metadata
        return Prompt(prompt_id, row.sample_id, text, NO_IDS, NO_IDS, media, spans, row.references, metadata)

    def prompt_text(self, row: Row) -> str:
        return plain(row.question.replace(IMAGE_PLACEHOLDER, "")).strip() + self._suffix

    def check(self, row: Row) -> int:
        """0: a prompt has no tokens."""
        if row.history or row.template or row.videos or row.audios:
            raise PromptError(
                f"{row.sample_id} has {len(row.history)} turns before the question, tools, videos or sounds: a flow "
                "model takes one text and images, so remove the row"
            )
        if len(row.images) != self._flow.num_images:
            raise PromptError(
                f"{row.sample_id} has {len(row.images)} images, and prompts of this run have sampler.flow.num_images="
                f"{self._flow.num_images} condition images: set it, or remove the row"
            )
        for source in row.images:
            check_image(source, self._data)
        if not self.prompt_text(row).strip():
            raise PromptError(f"{row.sample_id} has no text: write what the image shows, or remove the row")
        return 0

    def num_media(self, row: Row) -> int:
        return 1 if self._flow.guidance == 1 else 2

    def _latent_shape(self) -> tuple[int, ...]:
        return self._checkpoint.latent_shape(Denoising.of(self._flow))

    def _encoded_pixels(self, pixels: np.ndarray) -> np.ndarray:
        with self._lock:
            return self._family.encode_images(self._loaded_codec(), pixels[None])[0].float().numpy()

    def _loaded_codec(self) -> Any:
        if self._codec is None:
            self._codec = self._checkpoint.vae(torch.float32)
        return self._codec

    def _condition(self, text: str, images: tuple[ConditionImage, ...], *, is_first: bool) -> MediaHandle:
        """`is_first`: the condition has the files and the thumbnail of the images."""
        contents = [image.contents[0] for image in images]
        digest = "".join(content_key(content, "") for content in contents)
        key = content_key(text.encode(), f"{self.fingerprint} {digest} {is_first and bool(images)}")
        source = ", ".join([f"the text {text!r}", *(f"{image.source}" for image in images)])

        def encoded() -> ProcessedMedia:
            inputs, pictures = self._encoded(text, images)
            if not is_first or not pictures:
                return ProcessedMedia(CONDITION, inputs)
            files = tuple(contents) if self._keeps_files else ()
            shown = Image.fromarray(np.hstack([np.asarray(picture) for picture in pictures]))
            return ProcessedMedia(CONDITION, inputs, thumbnail(shown), files)

        return self._media.get_or_add(key, source, encoded)

    @torch.no_grad()
    def _encoded(
        self, text: str, images: tuple[ConditionImage, ...]
    ) -> tuple[dict[str, np.ndarray], list[Image.Image]]:
        """Returns the inputs of a condition, and the images as the model gets them."""
        limit = self._flow.max_text_tokens
        with self._lock:
            pictures, conditions = self._encoded_images(images) if images else ([], {})
            encoded = self._family.encode_with(self._pipeline, text, pictures, limit) | conditions
            self._report(text, self._family.num_cut(self._pipeline, text, limit))
        return {name: np.ascontiguousarray(t.float().numpy()) for name, t in encoded.items()}, pictures

    @lru_cache(maxsize=MAX_CONDITIONS)  # noqa: B019 - one processor a run
    def _encoded_images(self, images: tuple[ConditionImage, ...]) -> tuple[list[Image.Image], dict[str, torch.Tensor]]:
        size = (self._flow.width, self._flow.height)
        whole = [decode_image(image.contents[0], image.source, self._data) for image in images]
        scaled = ImageOps.fit if self._family.crops_images else Image.Image.resize
        pictures = [scaled(image, size, Image.Resampling.LANCZOS) for image in whole]
        shape, pixels = Denoising.of(self._flow).size, np.stack([np.asarray(picture) for picture in pictures])
        return pictures, self._family.encode_conditions(self._pipeline, self._loaded_codec(), pixels, shape)

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
