"""PlainTransformers: transformers' processor and generate() as their documentation shows them, to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from mobula.cluster.records.rgb import to_rgb
from mobula.learner.policies.loading import DTYPES, ignore_sampling_defaults, load_model


class PlainTransformers:
    """Takes rendered prompts and picture files, a padded batch at a time; nothing of our processors is used."""

    def __init__(
        self, model: str, *, dtype: str, device: str, takes_pictures: bool, processor_options: Mapping[str, Any]
    ) -> None:
        self._device = torch.device(device)
        self._model = load_model(model, DTYPES[dtype], "sdpa").to(self._device).eval()
        ignore_sampling_defaults(self._model)
        self._takes_pictures = takes_pictures
        if takes_pictures:
            self._processor = AutoProcessor.from_pretrained(model, **processor_options)
            self._tokenizer = self._processor.tokenizer
        else:
            self._processor = self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._tokenizer.padding_side = "left"

    @torch.no_grad()
    def generate(
        self,
        texts: Sequence[str],
        pictures: Sequence[Sequence[bytes]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        stop_ids: Sequence[int],
        pad_id: int,
        banned_ids: Sequence[int],
    ) -> list[list[int]]:
        """The new tokens of each prompt, up to the token that ends it; greedy at temperature 0."""
        inputs = self._inputs(texts, pictures).to(self._device)
        torch.manual_seed(seed)
        is_greedy = temperature == 0
        sampling = {} if is_greedy else {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        ids = self._model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=not is_greedy,
            eos_token_id=list(stop_ids),
            pad_token_id=pad_id,
            suppress_tokens=list(banned_ids) or None,
            **sampling,
        )
        new = ids[:, inputs["input_ids"].shape[1] :].tolist()
        return [_until_stop(row, set(stop_ids)) for row in new]

    def _inputs(self, texts: Sequence[str], pictures: Sequence[Sequence[bytes]]) -> Any:
        options = {"return_tensors": "pt", "padding": True, "add_special_tokens": False}
        images = [[_opened(content) for content in own] for own in pictures]
        if self._takes_pictures and any(images):
            return self._processor(text=list(texts), images=images, **options)
        return self._processor(text=list(texts), **options)


def _until_stop(ids: list[int], stop_ids: set[int]) -> list[int]:
    end = next((place + 1 for place, token in enumerate(ids) if token in stop_ids), len(ids))
    return ids[:end]


def _opened(content: bytes) -> Image.Image:
    with Image.open(BytesIO(content)) as picture:
        return to_rgb(picture)
