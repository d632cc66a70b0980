"""Family: everything that processor, policy and sampler need to compute a kind of model."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from mobula.configs.schema import DataConfig
from mobula.configs.schema.data import VideoConfig
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenBatch, joined

Size = tuple[int, int]  # (width, height) of an image as it is in its file


@dataclass(frozen=True)
class Clip:
    """Sampled frames of a video as a prompt shows them: their size and times, and the duration of the whole video."""

    width: int
    height: int
    timestamps: tuple[float, ...]  # seconds from the first frame of the video
    duration_s: float


class Family(ABC):
    """One kind of model, by the `model_type` values of its checkpoints.

    The log-probs of a policy are softmax(head(hidden_states)), where the head is the model's output embeddings and
    nothing else is done to the logits. Every family holds to that.
    """

    model_types: tuple[str, ...]
    """`model_type` of the checkpoints' config.json."""
    media_tokens: str
    """Pattern of the added tokens that stand for media or frame them. They are never sampled: a policy that sampled
    one would claim an image that is not there."""
    parts: Mapping[str, tuple[str, ...]]
    """Parts that can be frozen: name -> the beginnings of their parameters' checkpoint names."""
    takes_images: bool
    without_images = "policy.model is a text-only model"
    """Why a family without images takes none."""
    inner_types: tuple[str, ...] = ()
    """`model_type` of the part of a checkpoint that is the policy, where it holds more than that."""
    checkpoint_prefix = ""
    """Prefixes of the checkpoint names of that part."""
    transposed: str = r"(?!)"
    """Pattern of the checkpoint names whose last two axes lie in the other order there than in the model."""
    makes_images = False
    """Whether its answers are images, which are drawn with `sampler=image_tokens`."""
    needs_gate = False
    """Whether a run compares engine and learner before its first step. It does where no conformance run has done so, or
    where that depends on the weights."""
    engine_dtypes_on_cpu: tuple[str, ...] = ("float32", "bfloat16")
    """The values of `resources.dtype` in which vLLM computes it on CPU; the first one is that of its measurements."""
    on_cpu = ""
    """Differences with vLLM on CPU and their reason; docs/supported.md shows it."""
    keeps_packed_rows_apart = True
    """Whether `learner.packing` computes its rows as it computes them alone."""
    note = ""
    """Text on the family in docs/models.md beside its measurements."""

    @abstractmethod
    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        """The decoder's output before the output embeddings, float [B, S, H].

        The vision tower, where there is one, is entered exactly once whatever the batch holds, so that sharded
        parameters are gathered equally often on every rank. `ranks` have the batch together, and encode its images in
        shares.
        """

    def without_images_on(self, device: str, sampler: str) -> str:
        """Why prompts have no images in a run on this `resources.device` with this sampler; empty if they may."""
        return "" if self.takes_images else self.without_images

    def policy_config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The configuration of the part of a checkpoint that is the policy."""
        return config

    def media_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """The ids that are never sampled."""
        added = tokenizer.added_tokens_decoder.items()
        return tuple(i for i, token in added if re.fullmatch(self.media_tokens, token.content))


class ImageFamily(Family):
    """A family whose prompts hold images: a processor, expansions and tensors beside the tokens."""

    takes_images = True
    has_pixel_budget = False
    """Whether `data.min_pixels` and `data.max_pixels` decide how images are scaled; else the checkpoint's own rules
    do."""

    def placeholder_id(self, config: PreTrainedConfig) -> int:
        """The token whose places the embeddings of images take."""
        return int(config.image_token_id)

    def compact_placeholder_id(self, config: PreTrainedConfig) -> int:
        """The token that stands for an image in a prompt before its expansion."""
        return self.placeholder_id(config)

    def spaced(self, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """Rendered text as it is tokenised, with what the processor writes around the placeholders of images."""
        return text

    def processor_options(self, model: str, data: DataConfig) -> dict[str, Any]:
        """Settings of `data` that the processor of the checkpoint `model` is loaded with."""
        return {}

    def refuse_unfit(self, processor: ProcessorMixin, config: PreTrainedConfig) -> None:
        """Check what the family needs of a checkpoint's processor.

        Raises:
            ValueError: it cannot be used.
        """

    @abstractmethod
    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        """int32 [N]: what an image of this size becomes in a prompt, in the place of its one compact placeholder.

        Raises:
            ValueError: images of this size cannot be used.
        """

    def shown_size(self, processor: ProcessorMixin, size: Size) -> Size | None:
        """(width, height) that an image of this size is scaled to, where the model names places in those pixels; None
        where it sees tiles, or one size for all."""
        return None

    @abstractmethod
    def process(self, processor: ProcessorMixin, image: Image.Image) -> dict[str, np.ndarray]:
        """The tensors of one image by the names that the model's forward() gives them; images join along axis 0."""

    def engine_inputs(
        self, config: PreTrainedConfig, images: Sequence[Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray | list[np.ndarray]]:
        """The tensors of a prompt's images together, by the names that the inference engine gives them; a list has
        one for each, where their shapes differ."""
        return {name: joined([image[name] for image in images]) for name in images[0]}

    def forward_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The joined tensors of images in the shapes that forward() takes."""
        return dict(inputs)

    def generate_inputs(self, model: PreTrainedModel, token_types: Tensor) -> dict[str, Tensor]:
        """Arguments of forward() beside token ids and images; `token_types` int64 [B, S] is 1 at placeholders."""
        return {}


class AudioFamily(Family):
    """A family whose prompts hold sounds: mono samples, of which the model's feature extractor makes frames."""

    @abstractmethod
    def audio_placeholder_id(self, config: PreTrainedConfig) -> int:
        """The token whose places the embeddings of sounds take."""

    @abstractmethod
    def audio_expansion(self, processor: ProcessorMixin, num_samples: int) -> np.ndarray:
        """int32 [N]: what a sound becomes in a prompt, in the place of its one compact placeholder.

        Raises:
            ValueError: sounds of this length cannot be used.
        """

    @abstractmethod
    def process_audio(self, processor: ProcessorMixin, samples: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of one sound, of `samples` float32 [N], by the names that the model's forward() gives them;
        sounds join along axis 0."""

    def audio_engine_inputs(
        self, config: PreTrainedConfig, sounds: Sequence[Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """The tensors of a prompt's sounds together, by the names that the inference engine gives them."""
        return {name: joined([sound[name] for sound in sounds]) for name in sounds[0]}


class VideoFamily(ImageFamily):
    """A family whose prompts hold videos as well."""

    engine_video_token = ""
    """The token that the engine's own processing writes in the places of videos, if it is another one."""
    engine_max_videos: int | None = None
    """The most videos in a prompt that the engine's own processing takes; None: any number."""

    def video_placeholder_id(self, config: PreTrainedConfig) -> int:
        """The token whose places the embeddings of videos take; with some models that of images."""
        return int(config.video_token_id)

    def compact_video_placeholder_id(self, processor: ProcessorMixin) -> int:
        """The token that stands for a video in a prompt before its expansion."""
        return int(processor.tokenizer.convert_tokens_to_ids(vars(processor)["video_token"]))

    def engine_video_options(self, limits: VideoConfig) -> dict[str, int]:
        """Settings with which the engine's own processing scales frames as `process_video` does."""
        return {}

    @abstractmethod
    def video_expansion(self, processor: ProcessorMixin, clip: Clip, limits: VideoConfig) -> np.ndarray:
        """int32 [N]: what a video becomes in a prompt, in the place of its one compact placeholder.

        Raises:
            ValueError: videos of this size or length cannot be used.
        """

    @abstractmethod
    def process_video(
        self, processor: ProcessorMixin, frames: np.ndarray, clip: Clip, limits: VideoConfig
    ) -> dict[str, np.ndarray]:
        """The tensors of one video, of `frames` uint8 [T, H, W, 3], by the names that the model's forward() gives them;
        videos join along axis 0."""
