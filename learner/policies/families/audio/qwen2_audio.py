"""Qwen2-Audio: windows of 30 s, padding included, in a Whisper encoder; a linear layer into a text decoder."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin, Qwen2AudioProcessor
from transformers.masking_utils import create_bidirectional_mask

from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.families.audio.frames import expansion, extracted, num_embeddings, places, put
from mobula.learner.policies.families.base import AudioFamily
from mobula.learner.policies.families.vision import submodel


class Qwen2Audio(AudioFamily):
    """Source: arXiv:2407.10759.

    `input_features` of a sound is float32 [1, mel, 3000], `feature_attention_mask` int64 [1, 3000]. The frames after a
    sound are kept, because the convolution reads the first of them.
    """

    model_types = ("qwen2_audio",)
    media_tokens = r"<\|(AUDIO|audio_bos|audio_eos)\|>"
    parts = {
        "audio": ("audio_tower.",),
        "connector": ("multi_modal_projector.",),
        "language": ("language_model.",),
    }
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
        """The model without its output embeddings."""
        return submodel(model, "model")

    def hidden_states(self, model: PreTrainedModel, batch: TokenBatch, ranks: SequenceRanks | None = None) -> Tensor:
        core = self.core(model)
        tower, project = submodel(core, "audio_tower"), core.get_submodule("multi_modal_projector")
        features, mask = self._heard(core.config, batch)
        lengths = (mask.sum(-1) - 1) // 2 + 1  # after the first convolution
        seen = torch.arange(features.shape[-1] // 2, device=mask.device) < lengths[:, None]
        attention_mask = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=features.new_zeros(*seen.shape, 1),
            attention_mask=seen.long(),
        )
        encoded = tower(features, attention_mask=attention_mask).last_hidden_state
        projected = project(encoded)  # [N, F, H]
        sounds = [row[: num_embeddings(int(num))] for row, num in zip(projected, mask.sum(-1), strict=True)]
        embeds = model.get_input_embeddings()(batch.input_ids)
        embeds = put(embeds, places(batch, core.config.audio_token_id), sounds, batch.audios)
        return submodel(core, "language_model")(inputs_embeds=embeds, use_cache=False).last_hidden_state

    def _heard(self, config: PreTrainedConfig, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Returns the unique sounds of a batch, or a silent one, so that all ranks enter the tower equally often."""
        if batch.audios.inputs:
            return batch.audios.inputs["input_features"], batch.audios.inputs["feature_attention_mask"]
        audio = config.audio_config
        features = torch.zeros(1, audio.num_mel_bins, 2 * audio.max_source_positions, device=batch.input_ids.device)
        return features, torch.ones_like(features[:, 0], dtype=torch.int64)
