"""Family: the interface of a model family to processor, policy and sampler."""

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

Size = tuple[int, int]  # (width, height) of an image in its file
Arrays = dict[str, np.ndarray]  # of one medium, by argument of forward()
EngineInputs = dict[str, np.ndarray | list[np.ndarray]]


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
    the logits are not changed further. This holds for every family.
    """

    model_types: tuple[str, ...]  # `model_type` of the checkpoints' config.json
    media_tokens: str
    """Pattern of the added tokens that stand for media or frame them. They are never sampled: a sampled
    token would stand for a missing image."""
    parts: Mapping[str, tuple[str, ...]]
    """Parts that can be frozen: name -> prefixes of the parameters' checkpoint names."""
    takes_images: bool
    without_images = "policy.model is a text-only model"  # reason why a family without images takes none
    inner_types: tuple[str, ...] = ()  # `model_type` of the policy in a checkpoint with further parts
    checkpoint_prefix = ""  # prefix of the policy's checkpoint names in such a checkpoint
    transposed: str = r"(?!)"  # pattern of the checkpoint names of tensors stored with their last two axes swapped
    image_sampler = ""  # `sampler.kind` that samples images, if answers are images
    folders: tuple[str, ...] = ()  # folders of a checkpoint whose files are copied unchanged
    needs_gate = False
    """Whether a run compares engine and learner before its first step: if no conformance run did, or if the result
    depends on the weights."""
    engine_dtypes_on_cpu: tuple[str, ...] = ("float32", "bfloat16")
    """Values of `resources.dtype` that vLLM supports on CPU; measurements use the first one."""
    on_cpu = ""  # differences with vLLM on CPU and their reason; docs/supported.md shows it
    keeps_packed_rows_apart = True
    """Whether `learner.packing=true` gives the same results as separate rows; if not, it is refused."""
    padded_because = ""  # reason why `learner.packing=auto` computes padded rows; empty if it packs them
    shares_prefixes = True
    """Whether states and positions of tokens depend on earlier tokens and media alone, so that `learner.share_prompts`
    gives the same results."""

    def starts(self, entries: Sequence[str]) -> tuple[str, ...]:
        """`policy.freeze` as prefixes of checkpoint names; a part expands to its prefixes."""
        return tuple(start for entry in entries for start in self.parts.get(entry, (entry,)))

    @abstractmethod
    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        """Returns the decoder's output before the output embeddings, float [B, S, H].

        A vision tower is entered exactly once for every batch, so that sharded parameters are gathered equally often on
        every rank. `ranks` share the batch, and each encodes a share of the images.
        """

    def without_images_on(self, device: str, sampler: str) -> str:
        """Returns why prompts have no images on this `resources.device` with this sampler; empty if images work."""
        return "" if self.takes_images else self.without_images

    def policy_config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Returns the configuration of the policy in a checkpoint."""
        return config

    def media_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Returns the ids that are never sampled."""
        added = tokenizer.added_tokens_decoder.items()
        return tuple(i for i, token in added if re.fullmatch(self.media_tokens, token.content))


class ImageFamily(Family):
    """A family whose prompts hold images: a processor, expansions and image tensors."""

    takes_images = True
    has_pixel_budget = False
    """Whether `data.min_pixels` and `data.max_pixels` set the scale of images; else the checkpoint's rules do."""

    def placeholder_id(self, config: PreTrainedConfig) -> int:
        """Returns the token that image embeddings replace."""
        return int(config.image_token_id)

    def compact_placeholder_id(self, config: PreTrainedConfig) -> int:
        """Returns the token of an image in a prompt before expansion."""
        return self.placeholder_id(config)

    def spaced(self, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """Adds the processor's text around image placeholders to rendered text, before tokenisation."""
        return text

    def processor_options(self, model: str, data: DataConfig) -> dict[str, Any]:
        """Returns the settings from `data` for loading the processor of the checkpoint `model`."""
        return {}

    def refuse_unfit(self, processor: ProcessorMixin, config: PreTrainedConfig) -> None:
        """Raises: ValueError: the family cannot use this checkpoint's processor."""

    @abstractmethod
    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        """Returns int32 [N]: the tokens that replace the compact placeholder of an image of this size.
        Raises: ValueError: images of this size cannot be used."""

    def shown_size(self, processor: ProcessorMixin, size: Size) -> Size | None:
        """Returns the scaled (width, height) of an image if the model states coordinates in these pixels; None if it
        uses tiles or one size for all images."""
        return None

    @abstractmethod
    def process(self, processor: ProcessorMixin, image: Image.Image) -> dict[str, np.ndarray]:
        """Returns argument of forward() -> tensor of one image; images are concatenated along axis 0."""

    def engine_inputs(self, config: PreTrainedConfig, images: Sequence[Arrays]) -> EngineInputs:
        """Returns the tensors of a prompt's images by their names in the inference engine. A list has one tensor per
        image, if shapes differ."""
        return {name: joined([image[name] for image in images]) for name in images[0]}

    def forward_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the concatenated tensors of images in the shapes of forward()."""
        return dict(inputs)

    def generate_inputs(self, model: PreTrainedModel, token_types: Tensor) -> dict[str, Tensor]:
        """Returns further arguments of forward(), without token ids and images; `token_types` int64 [B, S] is 1 at
        placeholders."""
        return {}


class AudioFamily(Family):
    """A family whose prompts hold sounds: mono samples, which the feature extractor converts to frames."""

    @abstractmethod
    def audio_placeholder_id(self, config: PreTrainedConfig) -> int:
        """Returns the token that sound embeddings replace."""

    @abstractmethod
    def audio_expansion(self, processor: ProcessorMixin, num_samples: int) -> np.ndarray:
        """Returns int32 [N]: the tokens that replace the compact placeholder of a sound.
        Raises: ValueError: sounds of this length cannot be used."""

    @abstractmethod
    def process_audio(self, processor: ProcessorMixin, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Returns argument of forward() -> tensor of one sound, from `samples` float32 [N]; sounds are concatenated
        along axis 0."""

    def audio_engine_inputs(self, config: PreTrainedConfig, sounds: Sequence[Arrays]) -> dict[str, np.ndarray]:
        """Returns the tensors of a prompt's sounds by their names in the inference engine."""
        return {name: joined([sound[name] for sound in sounds]) for name in sounds[0]}


class VideoFamily(ImageFamily):
    """A family whose prompts hold images and videos."""

    engine_video_token = ""  # the video placeholder of the engine's own processing, if it differs

    def video_placeholder_id(self, config: PreTrainedConfig) -> int:
        """Returns the token that video embeddings replace; some models use the image token."""
        return int(config.video_token_id)

    def compact_video_placeholder_id(self, processor: ProcessorMixin) -> int:
        """Returns the token of a video in a prompt before expansion."""
        return int(processor.tokenizer.convert_tokens_to_ids(vars(processor)["video_token"]))

    @abstractmethod
    def video_expansion(self, processor: ProcessorMixin, clip: Clip, limits: VideoConfig) -> np.ndarray:
        """Returns int32 [N]: the tokens that replace the compact placeholder of a video.
        Raises: ValueError: videos of this size or length cannot be used."""

    @abstractmethod
    def process_video(self, processor: ProcessorMixin, frames: np.ndarray, clip: Clip, limits: VideoConfig) -> Arrays:
        """Returns argument of forward() -> tensor of one video, from `frames` uint8 [T, H, W, 3]; videos are
        concatenated along axis 0."""
