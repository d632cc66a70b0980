"""The thinker of Qwen2.5-Omni: images and videos as in Qwen2.5-VL, sounds beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

from mobula.configs.schema.data import VideoConfig
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenBatch, joined
from mobula.learner.policies.families.audio.frames import (
    expansion,
    extracted,
    num_embeddings,
    num_frames,
    places,
    put,
    put_at,
)
from mobula.learner.policies.families.base import AudioFamily, Clip, Size
from mobula.learner.policies.families.qwen_vl import QwenVL, num_grids, released_positions
from mobula.learner.policies.families.vision import MODALITIES, check_count, method, submodel

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

    def engine_video_options(self, limits: VideoConfig) -> dict[str, int]:
        """The bounds of a frame; those in the processor's code are larger."""
        return {"min_pixels": limits.min_frame_pixels, "max_pixels": limits.max_frame_pixels}

    def video_expansion(self, processor: ProcessorMixin, clip: Clip, limits: VideoConfig) -> np.ndarray:
        videos = processor.video_processor
        height, width = self.frame_size(videos, clip, limits)
        side = videos.patch_size * videos.merge_size
        num = num_grids(videos, clip) * (height // side) * (width // side)
        return np.full(num, _id_of(processor, processor.tokenizer.video_token), dtype=np.int32)

    def process_video(
        self, processor: ProcessorMixin, frames: np.ndarray, clip: Clip, limits: VideoConfig
    ) -> dict[str, np.ndarray]:
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

    def audio_engine_inputs(
        self, config: PreTrainedConfig, sounds: Sequence[Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
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
        encoded = self.encode_all(model, config, batch, ranks)
        for number, (placeholder, modality) in enumerate(
            zip(self.placeholder_ids(config), MODALITIES, strict=True), start=1
        ):
            is_placeholder = places(batch, placeholder)
            types[is_placeholder] = number
            check_count(encoded.get(modality), int(is_placeholder.sum()))
            if modality in encoded:
                embeds = put_at(embeds, is_placeholder, torch.cat(list(encoded[modality]["pooler_output"])))
        is_sound = places(batch, self.audio_placeholder_id(config))
        embeds = put(embeds, is_sound, self._sounds(model, batch), batch.audios)
        merge_size = config.vision_config.spatial_merge_size
        positions = released_positions(batch, torch.from_numpy(types), merge_size, config.position_id_per_seconds)
        return submodel(model, "model")(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state

    def _sounds(self, model: PreTrainedModel, batch: TokenBatch) -> Sequence[Tensor]:
        """[n, H] of each unique sound, or of a silent one, so that ranks enter the tower equally often."""
        if batch.audios.inputs:
            features, mask = batch.audios.inputs["input_features"], batch.audios.inputs["feature_attention_mask"]
        else:
            mel = model.config.audio_config.num_mel_bins
            features = torch.zeros(1, mel, SILENT_FRAMES, device=batch.input_ids.device)
            mask = torch.ones_like(features[:, 0], dtype=torch.int64)
        encoded = method(model, "get_audio_features")(features, mask, return_dict=True).last_hidden_state
        return encoded.split([num_embeddings(num) for num in mask.sum(-1).tolist()])


def _id_of(processor: ProcessorMixin, token: str) -> int:
    return int(processor.tokenizer.convert_tokens_to_ids(token))
