"""FlowProcessor: turns rows into prompts whose text is encoded, once for all siblings and roles."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from actors.datasets.rows import Row
from cluster.errors import PromptError
from cluster.records.media import MediaHandle, MediaKeeper, ProcessedMedia, content_key
from cluster.records.trajectory import NO_IDS, Prompt
from configs.schema import DataConfig
from configs.schema.rollout import FlowConfig
from learner.policies.flow.checkpoint import FlowCheckpoint
from learner.policies.flow.rows import CONDITION, WHERE


class FlowProcessor:
    """Encodes texts with the encoders of a checkpoint, on the CPU of this process; each text once.

    A prompt has no tokens. Its media are its encoded text and, with guidance, the encoded negative prompt.
    """

    takes_pictures = False
    media_token_ids: tuple[int, ...] = ()  # nothing is sampled among tokens
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id = 0

    def __init__(self, checkpoint: FlowCheckpoint, data: DataConfig, flow: FlowConfig, media: MediaKeeper) -> None:
        self._family = checkpoint.family
        self._pipeline: Any = checkpoint.encoder()
        self._suffix = data.prompt_suffix
        self._flow = flow
        self._media = media
        self._lock = threading.Lock()
        self.fingerprint = f"{checkpoint.encoder_fingerprint()} {flow.max_text_tokens}"

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        """The row as a prompt, its text encoded and stored.

        Raises:
            PromptError: the row has pictures or no text.
        """
        self.check(row)
        text = row.question + self._suffix
        negatives = () if self._flow.guidance == 1 else (self._condition(self._flow.negative_prompt),)
        media = (self._condition(text), *negatives)
        spans, metadata = (WHERE,) * len(media), row.metadata
        return Prompt(prompt_id, row.sample_id, text, NO_IDS, NO_IDS, media, spans, row.references, metadata)

    def check(self, row: Row) -> int:
        """0: a prompt has no tokens.

        Raises:
            PromptError: as `prepare`.
        """
        if row.images or row.history:
            raise PromptError(
                f"{row.sample_id} has {len(row.images)} pictures and {len(row.history)} turns before the question: a "
                "flow model takes one text, so remove the row"
            )
        if not (row.question + self._suffix).strip():
            raise PromptError(f"{row.sample_id} has no text: write what the picture shows, or remove the row")
        return 0

    def num_media(self, row: Row) -> int:
        """How many media the prompt of a row has: texts that are encoded."""
        return 1 if self._flow.guidance == 1 else 2

    def _condition(self, text: str) -> MediaHandle:
        key = content_key(text.encode(), self.fingerprint)
        return self._media.get_or_add(key, f"the text {text!r}", lambda: self._encoded(text))

    @torch.no_grad()
    def _encoded(self, text: str) -> ProcessedMedia:
        with self._lock:
            encoded = self._family.encode(self._pipeline, text, self._flow.max_text_tokens)
        return ProcessedMedia(CONDITION, {k: np.ascontiguousarray(t.float().numpy()) for k, t in encoded.items()})
