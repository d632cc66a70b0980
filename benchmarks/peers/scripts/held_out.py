"""Held-out accuracy of a vision-language model of transformers, by greedy generation."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def add_options(parser: ArgumentParser) -> None:
    """Options of an evaluation; `accuracy` 0 asks for none."""
    parser.add_argument("--accuracy", type=float, default=0.0)
    parser.add_argument("--held-out", type=Path, help="a split")
    parser.add_argument("--held-out-rows", type=int, default=0)
    parser.add_argument("--interval", type=int, default=1, help="steps between two evaluations")


@torch.no_grad()
def greedy_accuracy(
    model: Any, *, processor: Any, rows: Sequence[Mapping[str, Any]], tokens: int, banned: Sequence[int]
) -> float:
    """The share of rows (`prompt`, `solution`, `images`) whose solution is in the response, all rows as one batch."""
    chats = [[{"role": "user", "content": [*({"type": "image"} for _ in row["images"]), _text(row)]}] for row in rows]
    texts = [processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    images = [image for row in rows for image in row["images"]]
    inputs = processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
    was_training = model.training
    model.eval()
    found = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, suppress_tokens=list(banned))
    model.train(was_training)
    answers = processor.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(row["solution"] in answer for row, answer in zip(rows, answers, strict=True)) / len(rows)


def _text(row: Mapping[str, Any]) -> dict[str, str]:
    return {"type": "text", "text": row["prompt"][0]["content"]}
