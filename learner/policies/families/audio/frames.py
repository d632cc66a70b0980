"""Counts frames and embeddings of sounds, and places the embeddings in prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import ProcessorMixin

from mobula.learner.policies.batch import MediaBatch, TokenBatch
from mobula.learner.policies.device_copies import on_device


def num_frames(processor: ProcessorMixin, num_samples: int) -> int:
    """Returns the number of frames of a sound, without the silent frames that the extractor appends."""
    return -(-num_samples // processor.feature_extractor.hop_length)


def num_embeddings(frames: int) -> int:
    """Returns the number of embeddings for `frames`: a convolution and a mean, each of stride 2."""
    return max(0, ((frames - 1) // 2 + 1 - 2) // 2 + 1)


def expansion(processor: ProcessorMixin, num_samples: int, placeholder: int) -> np.ndarray:
    """int32 [N]: the placeholders of a sound.

    Raises:
        ValueError: it is too short for one embedding.
    """
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

    Raises:
        ValueError: the numbers of placeholders and embeddings differ.
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
