"""Processors that turn rows into prompts that end with the token that opens an image."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoProcessor

from mobula.actors.datasets.rows import Row
from mobula.cluster.errors import PromptError
from mobula.cluster.records.markup import plain
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.schema import RunConfig
from mobula.learner.policies.image_tokens import num_image_tokens


class DrawingProcessor(ABC):
    """Builds prompts of one text and the token that opens an image."""

    takes_images = False
    media_token_ids: tuple[int, ...] = ()  # none is banned: image tokens are sampled
    template_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    template_source = ""

    def __init__(self, tokenizer: Any, num_tokens: int, config: RunConfig) -> None:
        """`num_tokens` are those of an image."""
        model, longest = config.policy.model, config.sampler.max_model_len
        self._tokenizer = tokenizer
        self._suffix = config.question_suffix
        self._longest = min(config.data.max_prompt_tokens, longest - num_tokens)
        if self._longest < 1:
            raise ValueError(
                f"sampler.max_model_len={longest} has no room for the {num_tokens} tokens of an image of "
                f"policy.model={model}: raise it"
            )
        self.pad_token_id: int = tokenizer.pad_token_id
        self.fingerprint = hashlib.sha256(repr((tokenizer.chat_template, len(tokenizer))).encode()).hexdigest()

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        text, ids = self._encoded(row)
        return Prompt(prompt_id, row.sample_id, text, ids, ids, (), (), row.references, row.metadata)

    def num_media(self, row: Row) -> int:
        return 0

    def prompt_text(self, row: Row) -> str:
        return self._encoded(row)[0]

    def check(self, row: Row) -> int:
        return len(self._encoded(row)[1])

    @abstractmethod
    def _ids(self, text: str) -> list[int]:
        """Returns the token ids of a prompt."""

    def _encoded(self, row: Row) -> tuple[str, np.ndarray]:
        text = plain(row.question) + self._suffix
        if row.images or row.history or row.template or not text.strip():
            raise PromptError(
                f"{row.sample_id} has {len(row.images)} images, {len(row.history)} turns before the question and a "
                f"text of {len(text.strip())} characters: an image is drawn of one text, so change or remove the row"
            )
        ids = self._ids(text)
        if len(ids) > self._longest:
            raise PromptError(
                f"{row.sample_id} has a prompt of {len(ids)} tokens, more than {self._longest}: shorten it, or raise "
                "data.max_prompt_tokens and sampler.max_model_len"
            )
        return text, np.array(ids, dtype=np.int32)


class ImageTokenProcessor(DrawingProcessor):
    """Builds prompts of one user turn, the generation prompt, and the token that opens an image."""

    def __init__(self, config: RunConfig) -> None:
        model = config.policy.model
        self._processor: Any = AutoProcessor.from_pretrained(model, trust_remote_code=False)
        num_tokens = num_image_tokens(AutoConfig.from_pretrained(model, trust_remote_code=False))
        super().__init__(self._processor.tokenizer, num_tokens, config)
        self._template_kwargs = dict(config.data.template_kwargs)
        self.template_source = str(self._processor.chat_template)

    def _ids(self, text: str) -> list[int]:
        turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        rendered = self._processor.apply_chat_template(
            turn, add_generation_prompt=True, tokenize=False, **self._template_kwargs
        )
        ids: list[int] = self._tokenizer(rendered + self._tokenizer.boi_token, add_special_tokens=False)["input_ids"]
        return ids
