"""ImageTokenProcessor: turns rows into prompts that end with the token that opens an image."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoProcessor

from mobula.actors.datasets.rows import Row
from mobula.cluster.errors import PromptError
from mobula.cluster.records.markup import plain
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.schema import DataConfig
from mobula.configs.schema.rollout import SamplerConfig
from mobula.learner.policies.image_tokens import num_image_tokens


class ImageTokenProcessor:
    """Builds prompts of one user turn, the generation prompt, and the token that opens an image."""

    takes_images = False
    media_token_ids: tuple[int, ...] = ()  # none is banned: image tokens are sampled
    template_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, model: str, data: DataConfig, sampler: SamplerConfig, suffix: str = "") -> None:
        """`suffix` is appended to every prompt."""
        self._processor: Any = AutoProcessor.from_pretrained(model, trust_remote_code=False)
        self._suffix = suffix
        self._template_kwargs = dict(data.template_kwargs)
        needed = num_image_tokens(AutoConfig.from_pretrained(model, trust_remote_code=False))
        self._longest = min(data.max_prompt_tokens, sampler.max_model_len - needed)
        if self._longest < 1:
            raise ValueError(
                f"sampler.max_model_len={sampler.max_model_len} has no room for the {needed} tokens of an image of "
                f"policy.model={model}: raise it"
            )
        tokenizer = self._processor.tokenizer
        self.pad_token_id: int = tokenizer.pad_token_id
        self.fingerprint = hashlib.sha256(repr((tokenizer.chat_template, len(tokenizer))).encode()).hexdigest()

    @property
    def template_source(self) -> str:
        return str(self._processor.chat_template)

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        text, ids = self._encoded(row)
        return Prompt(prompt_id, row.sample_id, text, ids, ids, (), (), row.references, row.metadata)

    def num_media(self, row: Row) -> int:
        return 0

    def prompt_text(self, row: Row) -> str:
        return self._encoded(row)[0]

    def check(self, row: Row) -> int:
        return len(self._encoded(row)[1])

    def _encoded(self, row: Row) -> tuple[str, np.ndarray]:
        text = plain(row.question) + self._suffix
        if row.images or row.history or row.template or not text.strip():
            raise PromptError(
                f"{row.sample_id} has {len(row.images)} images, {len(row.history)} turns before the question and a "
                f"text of {len(text.strip())} characters: an image is drawn of one text, so change or remove the row"
            )
        turn = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        rendered = self._processor.apply_chat_template(
            turn, add_generation_prompt=True, tokenize=False, **self._template_kwargs
        )
        tokenizer = self._processor.tokenizer
        ids = tokenizer(rendered + tokenizer.boi_token, add_special_tokens=False)["input_ids"]
        if len(ids) > self._longest:
            raise PromptError(
                f"{row.sample_id} has a prompt of {len(ids)} tokens, more than {self._longest}: shorten it, or raise "
                "data.max_prompt_tokens and sampler.max_model_len"
            )
        return text, np.array(ids, dtype=np.int32)
