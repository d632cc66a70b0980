"""Modality: checks, measures, reads, stores and expands the images, videos or sounds of prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from PIL import Image
from transformers import PreTrainedConfig

from mobula.actors.datasets.media import Audio, ImageSource, Video
from mobula.actors.datasets.rows import IMAGE_PLACEHOLDER
from mobula.actors.processors.media import (
    AudioLimits,
    LoadedMedium,
    check_audio,
    check_image,
    check_video,
    decode_audio,
    decode_image,
    decode_video,
    draw_sound,
    load_audio,
    load_image,
    load_video,
    require_av,
    require_soundfile,
)
from mobula.cluster.errors import MediaError, PromptError
from mobula.cluster.records.media import IMAGE_SIZES, SHOWN_SIZES, MediaHandle, MediaKeeper, ProcessedMedia, content_key
from mobula.configs.schema.data import DataConfig
from mobula.learner.policies.families import AUDIO_TYPES, VIDEO_TYPES, model_type_at
from mobula.learner.policies.families.base import AudioFamily, Clip, Family, ImageFamily, Size, VideoFamily

THUMBNAIL_SIZE = (128, 128)
NUM_CACHED_SIZES = 4096

S = TypeVar("S")  # source of a medium
M = TypeVar("M")  # measure of a medium: it determines the number of tokens


@dataclass(frozen=True)
class MediaModel:
    """The parts of a checkpoint that turn media into tokens and tensors, and where these are stored."""

    name: str  # `policy.model`
    family: Family
    processor: Any  # ProcessorMixin, or the tokenizer of a model without media
    config: PreTrainedConfig
    fingerprint: str  # of all settings that determine tokens and tensors
    data: DataConfig
    media: MediaKeeper
    keeps_files: bool  # whether encoded files are stored too


class Modality(ABC, Generic[S, M]):
    """One kind of media in prompts. A constructor raises ValueError if the configuration allows such media and the
    model or this machine does not read them."""

    name: ClassVar[str]
    limit_key: ClassVar[str]
    remedy: ClassVar[str]  # for a medium that has no expansion
    layout: ClassVar[str]  # for a text whose number of placeholders differs from the number of media
    placeholder_id: int | None = None  # of a medium before expansion
    measure: Callable[[S], M]
    """Measures a medium from the headers of its file."""
    load: Callable[[S], LoadedMedium[S, M]]
    """Reads and measures a medium. Decodes nothing."""

    def __init__(self, model: MediaModel, limit: int) -> None:
        """`limit` is the maximum number in a prompt."""
        self.limit = limit
        self._model = model

    def check(self, sources: Sequence[S], row: str) -> None:
        if len(sources) > self.limit:
            raise PromptError(
                f"{row} has {len(sources)} {self.name}, {self.limit_key} is {self.limit}: raise it or remove the row"
            )

    @abstractmethod
    def process(self, medium: LoadedMedium[S, M]) -> ProcessedMedia:
        """Decodes a medium and converts it to the inputs of the model."""

    @abstractmethod
    def expansion(self, measure: M) -> np.ndarray:
        """Returns int32 [N]: the tokens that replace a placeholder. Raises: ValueError: the medium cannot be used."""

    @abstractmethod
    def described(self, measure: M) -> str:
        """The measure in an error."""

    @abstractmethod
    def key(self, medium: LoadedMedium[S, M]) -> str:
        """The key under which a processed medium is stored."""

    def store(self, medium: LoadedMedium[S, M]) -> MediaHandle:
        """Handle of the processed medium; equal media are processed once."""
        return self._model.media.get_or_add(self.key(medium), str(medium.source), partial(self.process, medium))

    def expansions(
        self, compact_ids: np.ndarray, sources: Sequence[S], measures: Sequence[M], row: str
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the positions of placeholders in `compact_ids`, and the replacement ids of each."""
        expansions = []
        for source, measure in zip(sources, measures, strict=True):
            try:
                expansions.append(self.expansion(measure))
            except ValueError as error:
                shown = self.described(measure)
                raise MediaError(f"{source} {shown}: {error}; {self.remedy} or remove its row") from error
        positions = np.flatnonzero(compact_ids == self.placeholder_id)
        if len(positions) != len(expansions):
            raise PromptError(
                f"{row} has {len(expansions)} {self.name} and its rendered text {len(positions)} placeholders: "
                f"{self.layout}"
            )
        return positions, expansions

    def _refused(self, types: Sequence[str]) -> ValueError:
        return ValueError(
            f"{self.limit_key}={self.limit} asks for {self.name}, which are not computed for "
            f"policy.model={self._model.name} of type {model_type_at(self._model.name)}: set it to 0, or choose a "
            f"checkpoint of type {', '.join(types)}"
        )


class ImageModality(Modality[ImageSource, Size]):
    """Images; (width, height) determines the tokens."""

    name = "images"
    limit_key = "sampler.max_images_per_prompt"
    remedy = "crop it"
    layout = f"write one {IMAGE_PLACEHOLDER} an image into the question"

    def __init__(self, model: MediaModel, limit: int, refusal: str) -> None:
        """`refusal` says why prompts have no images; empty if they may have some."""
        super().__init__(model, limit)
        self._refusal = refusal
        self.measure, self.load = partial(check_image, data=model.data), partial(load_image, data=model.data)
        if isinstance(model.family, ImageFamily):
            self._family = model.family
            self.placeholder_id = model.family.compact_placeholder_id(model.config)
            self._expansion = lru_cache(maxsize=NUM_CACHED_SIZES)(partial(model.family.expansion, model.processor))
            self._shown_size = lru_cache(maxsize=NUM_CACHED_SIZES)(partial(model.family.shown_size, model.processor))

    def check(self, sources: Sequence[ImageSource], row: str) -> None:
        if sources and self._refusal:
            raise PromptError(
                f"{row} has {len(sources)} images, and {self._refusal}: remove the row, or choose a vision-language "
                "model"
            )
        super().check(sources, row)

    def process(self, medium: LoadedMedium[ImageSource, Size]) -> ProcessedMedia:
        image = decode_image(medium.contents[0], medium.source, self._model.data)
        files = medium.contents if self._model.keeps_files else ()
        return ProcessedMedia("image", self._family.process(self._model.processor, image), thumbnail(image), files)

    def expansion(self, measure: Size) -> np.ndarray:
        return self._expansion(measure)

    def described(self, measure: Size) -> str:
        return f"is {measure[0]} x {measure[1]}"

    def key(self, medium: LoadedMedium[ImageSource, Size]) -> str:
        return content_key(medium.contents[0], self._model.fingerprint)

    def sizes(self, sizes: Sequence[Size]) -> dict[str, list[list[int]]]:
        """Image sizes for reward functions: of the files, and as the model sees them."""
        if not sizes:
            return {}
        shown = [self._shown_size(size) for size in sizes]
        of_files = {IMAGE_SIZES: [list(size) for size in sizes]}
        return of_files | ({SHOWN_SIZES: [list(size) for size in shown if size]} if all(shown) else {})


class VideoModality(Modality[Video, Clip]):
    """Videos; the sampled frames determine the tokens. Engine, learner and reward functions get the same frames."""

    name = "videos"
    limit_key = "sampler.max_videos_per_prompt"
    remedy = "change the video"
    layout = "the chat template of policy.model has no place for videos, use another template"

    def __init__(self, model: MediaModel, limit: int) -> None:
        super().__init__(model, limit)
        self.measure, self.load = partial(check_video, data=model.data), partial(load_video, data=model.data)
        self._fingerprint = f"{model.fingerprint} {model.data.video.model_dump_json()}"
        if limit:
            if not isinstance(model.family, VideoFamily):
                raise self._refused(VIDEO_TYPES)
            require_av()
            self._family = model.family
            self.placeholder_id = model.family.compact_video_placeholder_id(model.processor)

    def process(self, medium: LoadedMedium[Video, Clip]) -> ProcessedMedia:
        data, is_kept = self._model.data, self._model.keeps_files
        frames = decode_video(medium, data)
        images = [Image.fromarray(frame) for frame in (frames if is_kept else frames[:1])]
        inputs = self._family.process_video(self._model.processor, frames, medium.measure, data.video)
        return ProcessedMedia("video", inputs, thumbnail(images[0]), tuple(map(_png, images)) if is_kept else ())

    def expansion(self, measure: Clip) -> np.ndarray:
        return self._family.video_expansion(self._model.processor, measure, self._model.data.video)

    def described(self, measure: Clip) -> str:
        return f"gives {len(measure.timestamps)} frames of {measure.width} x {measure.height}"

    def key(self, medium: LoadedMedium[Video, Clip]) -> str:
        return content_key(b"".join(medium.contents) + repr(medium.measure).encode(), self._fingerprint)


class SoundModality(Modality[Audio, int]):
    """Sounds; the number of samples determines the tokens."""

    name = "sounds"
    limit_key = "sampler.max_audios_per_prompt"
    remedy = "change the sound"
    layout = "the chat template of policy.model has no place for sounds, use another template"

    def __init__(self, model: MediaModel, limit: int) -> None:
        super().__init__(model, limit)
        if limit:
            if not isinstance(model.family, AudioFamily):
                raise self._refused(AUDIO_TYPES)
            require_soundfile()
            self._family = model.family
            self.placeholder_id = model.family.audio_placeholder_id(model.config)
            features = model.processor.feature_extractor
            limits = self.limits = AudioLimits(model.data.audio, features.sampling_rate, features.n_samples)
            self.measure, self.load = partial(check_audio, limits=limits), partial(load_audio, limits=limits)

    def process(self, medium: LoadedMedium[Audio, int]) -> ProcessedMedia:
        samples = decode_audio(medium, self.limits)
        inputs = self._family.process_audio(self._model.processor, samples)
        return ProcessedMedia("audio", inputs, _png(draw_sound(samples, THUMBNAIL_SIZE)))

    def expansion(self, measure: int) -> np.ndarray:
        return self._family.audio_expansion(self._model.processor, measure)

    def described(self, measure: int) -> str:
        return f"has {measure} samples"

    def key(self, medium: LoadedMedium[Audio, int]) -> str:
        return content_key(medium.contents[0], f"{self._model.fingerprint} audio")


def thumbnail(image: Image.Image) -> bytes:
    small = image.copy()
    small.thumbnail(THUMBNAIL_SIZE)
    return _png(small)


def _png(image: Image.Image) -> bytes:
    png = BytesIO()
    image.save(png, format="PNG")
    return png.getvalue()
