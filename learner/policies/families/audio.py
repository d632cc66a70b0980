"""Families that hear."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin, Qwen2AudioProcessor
from transformers.masking_utils import create_bidirectional_mask

from mobula.configs.schema.data import VideoConfig
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import MediaBatch, TokenBatch, joined
from mobula.learner.policies.families.base import Arrays, AudioFamily, Clip, Size
from mobula.learner.policies.families.vision import (
    MODALITIES,
    QwenVL,
    check_count,
    method,
    num_grids,
    released_positions,
    submodel,
)


def num_frames(processor: ProcessorMixin, num_samples: int) -> int:
    """Returns the number of frames of a sound, without the silent frames that the extractor appends."""
    return -(-num_samples // processor.feature_extractor.hop_length)


def num_embeddings(frames: int) -> int:
    """Returns the number of embeddings for `frames`: a convolution and a mean, each of stride 2."""
    return max(0, ((frames - 1) // 2 + 1 - 2) // 2 + 1)


def expansion(processor: ProcessorMixin, num_samples: int, placeholder: int) -> np.ndarray:
    """int32 [N]: the placeholders of a sound."""
    num = num_embeddings(num_frames(processor, num_samples))
    if num == 0:
        least = 2 * processor.feature_extractor.hop_length + 1
        raise ValueError(f"it is too short to be heard, {least} samples are the fewest")
    return np.full(num, placeholder, dtype=np.int32)


def extracted(processor: ProcessorMixin, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 [1, mel, F], frames padded to the extractor's length, and their mask int64 [1, F]."""
    extractor = processor.feature_extractor
    made = extractor(
        [samples],
        sampling_rate=extractor.sampling_rate,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="np",
    )
    return made["input_features"].astype(np.float32), made["attention_mask"].astype(np.int64)


def put(embeds: Tensor, is_placeholder: np.ndarray, sounds: Sequence[Tensor], media: MediaBatch) -> Tensor:
    """Returns [B, S, H]: `embeds` with sound embeddings at their placeholders, bool [B, S] on the host.

    `sounds` has [n, H] for each unique sound of `media`; without sounds it has a silent one, which is not inserted.
    """
    chosen = torch.cat([sounds[i] for i in media.order]) if media.order else torch.cat(list(sounds))[:0]
    if len(chosen) != int(is_placeholder.sum()):
        raise ValueError(
            f"the recorded media spans hold {int(is_placeholder.sum())} placeholders of sounds but the audio tower "
            f"made {len(chosen)} embeddings: prompts were processed with another model's processor"
        )
    return put_at(embeds, is_placeholder, chosen)


def put_at(embeds: Tensor, is_placeholder: np.ndarray, features: Tensor) -> Tensor:
    """Returns [B, S, H]: `embeds` with `features` [N, H] at the N placeholders, bool [B, S] on the host, row by row."""
    places = tuple(on_device(axis, embeds.device) for axis in np.nonzero(is_placeholder))
    return embeds.index_put(places, features.to(embeds.dtype))


def places(batch: TokenBatch, placeholder: int) -> np.ndarray:
    """Returns bool [B, S]: the positions of sound embeddings."""
    return (batch.host_ids == placeholder) & batch.in_media


def heard(config: PreTrainedConfig, batch: TokenBatch, num_silent: int) -> tuple[Tensor, Tensor]:
    """The frames and masks of the unique sounds of a batch, or of `num_silent` silent frames, so that all ranks enter
    the tower equally often."""
    if batch.audios.inputs:
        return batch.audios.inputs["input_features"], batch.audios.inputs["feature_attention_mask"]
    features = torch.zeros(1, config.audio_config.num_mel_bins, num_silent, device=batch.input_ids.device)
    return features, torch.ones_like(features[:, 0], dtype=torch.int64)


class Qwen2Audio(AudioFamily):
    """Source: arXiv:2407.10759.

    `input_features` of a sound is float32 [1, mel, 3000], `feature_attention_mask` int64 [1, 3000]. The frames after a
    sound are kept, because the convolution reads the first of them.
    """

    model_types = ("qwen2_audio",)
    media_tokens = r"<\|(AUDIO|audio_bos|audio_eos)\|>"
    parts = {"audio": ("audio_tower.",), "connector": ("multi_modal_projector.",), "language": ("language_model.",)}
    takes_images = False
    without_images = "policy.model takes sounds and no images"

    def audio_placeholder_id(self, config: PreTrainedConfig) -> int:
        return int(config.audio_token_id)

    def audio_expansion(self, processor: ProcessorMixin, num_samples: int) -> np.ndarray:
        assert isinstance(processor, Qwen2AudioProcessor)
        return expansion(processor, num_samples, processor.audio_token_id)

    def process_audio(self, processor: ProcessorMixin, samples: np.ndarray) -> dict[str, np.ndarray]:
        features, mask = extracted(processor, samples)
        return {"input_features": features, "feature_attention_mask": mask}

    def core(self, model: PreTrainedModel) -> PreTrainedModel:
        return submodel(model, "model")

    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        core = self.core(model)
        tower, project = submodel(core, "audio_tower"), core.get_submodule("multi_modal_projector")
        features, mask = heard(core.config, batch, 2 * core.config.audio_config.max_source_positions)
        lengths = (mask.sum(-1) - 1) // 2 + 1  # after the first convolution
        seen = torch.arange(features.shape[-1] // 2, device=mask.device) < lengths[:, None]
        attention_mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=features.new_zeros(*seen.shape, 1), attention_mask=seen.long()
        )
        projected = project(tower(features, attention_mask=attention_mask).last_hidden_state)  # [N, F, H]
        sounds = [row[: num_embeddings(int(num))] for row, num in zip(projected, mask.sum(-1), strict=True)]
        embeds = model.get_input_embeddings()(batch.input_ids)
        embeds = put(embeds, places(batch, core.config.audio_token_id), sounds, batch.audios)
        return submodel(core, "language_model")(inputs_embeds=embeds, use_cache=False).last_hidden_state


SILENT_FRAMES = 4  # the fewest that give an embedding


class Qwen25Omni(QwenVL, AudioFamily):
    """Source: arXiv:2503.20215. The talker is not trained, and the sound of videos is ignored.

    `input_features` of a sound is float32 [1, mel, F], `feature_attention_mask` int64 [1, F], without the
    extractor's padding: the tower cuts sounds into windows and reads no frames after a sound.
    """

    model_types = ("qwen2_5_omni",)
    inner_types = ("qwen2_5_omni_thinker",)
    checkpoint_prefix = "thinker."
    media_tokens = r"<\|(IMAGE|VIDEO|AUDIO|(vision|audio)_(bos|eos))\|>"
    parts = {
        "vision": ("thinker.visual.",),
        "audio": ("thinker.audio_tower.",),
        "connector": ("thinker.visual.merger.", "thinker.audio_tower.proj."),
        "language": ("thinker.model.", "thinker.lm_head."),
    }

    def policy_config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        return config.thinker_config if config.model_type in self.model_types else config

    def placeholder_id(self, config: PreTrainedConfig) -> int:
        return int(self.policy_config(config).image_token_id)

    def video_placeholder_id(self, config: PreTrainedConfig) -> int:
        return int(self.policy_config(config).video_token_id)

    def audio_placeholder_id(self, config: PreTrainedConfig) -> int:
        return int(self.policy_config(config).audio_token_id)

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        width, height = size
        images = processor.image_processor
        num_patches = images.get_number_of_image_patches(height, width)
        token = _id_of(processor, processor.tokenizer.image_token)
        return np.full(num_patches // images.merge_size**2, token, dtype=np.int32)

    def video_expansion(self, processor: ProcessorMixin, clip: Clip, limits: VideoConfig) -> np.ndarray:
        videos = processor.video_processor
        height, width = self.frame_size(videos, clip, limits)
        side = videos.patch_size * videos.merge_size
        num = num_grids(videos, clip) * (height // side) * (width // side)
        return np.full(num, _id_of(processor, processor.tokenizer.video_token), dtype=np.int32)

    def process_video(self, processor: ProcessorMixin, frames: np.ndarray, clip: Clip, limits: VideoConfig) -> Arrays:
        seconds = processor.video_processor.temporal_patch_size * clip.duration_s / len(clip.timestamps)
        inputs = super().process_video(processor, frames, clip, limits)
        return inputs | {"second_per_grid_ts": np.array([seconds], dtype=np.float32)}

    def audio_expansion(self, processor: ProcessorMixin, num_samples: int) -> np.ndarray:
        return expansion(processor, num_samples, _id_of(processor, processor.tokenizer.audio_token))

    def process_audio(self, processor: ProcessorMixin, samples: np.ndarray) -> dict[str, np.ndarray]:
        features, mask = extracted(processor, samples)
        num = num_frames(processor, len(samples))
        return {
            "input_features": np.ascontiguousarray(features[:, :, :num]),
            "feature_attention_mask": np.ascontiguousarray(mask[:, :num]),
        }

    def audio_engine_inputs(self, config: PreTrainedConfig, sounds: Sequence[Arrays]) -> dict[str, np.ndarray]:
        masks = [sound["feature_attention_mask"] for sound in sounds]
        return {
            "input_audio_features": np.concatenate([sound["input_features"][0] for sound in sounds], axis=1),
            "feature_attention_mask": joined(masks),
            "audio_feature_lengths": np.array([mask.shape[1] for mask in masks]),
        }

    def core(self, model: PreTrainedModel) -> PreTrainedModel:
        return model

    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        """Runs the parts separately: the model's forward() computes logits of every token."""
        config, ids = model.config, batch.input_ids
        embeds = model.get_input_embeddings()(ids)
        types = np.zeros_like(batch.host_ids)  # [B, S]
        encoded = self.encode_all(model, batch, ranks)
        for number, (placeholder, modality) in enumerate(
            zip(self.placeholder_ids(config), MODALITIES, strict=True), start=1
        ):
            is_placeholder = places(batch, placeholder)
            types[is_placeholder] = number
            check_count(encoded.get(modality), int(is_placeholder.sum()))
            if modality in encoded:
                embeds = put_at(embeds, is_placeholder, torch.cat(list(encoded[modality]["pooler_output"])))
        is_sound = places(batch, self.audio_placeholder_id(config))
        features, mask = heard(model.config, batch, SILENT_FRAMES)
        states = method(model, "get_audio_features")(features, mask, return_dict=True).last_hidden_state
        sounds = states.split([num_embeddings(num) for num in mask.sum(-1).tolist()])  # [n, H] each
        embeds = put(embeds, is_sound, sounds, batch.audios)
        merge_size = config.vision_config.spatial_merge_size
        positions = released_positions(batch, torch.from_numpy(types), merge_size, config.position_id_per_seconds)
        return submodel(model, "model")(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state


def _id_of(processor: ProcessorMixin, token: str) -> int:
    return int(processor.tokenizer.convert_tokens_to_ids(token))
