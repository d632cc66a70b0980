"""TRL's GRPOTrainer on the prompts of a Mobula data set; transformers generates, with its default cache.

Its other mode without vLLM, continuous batching, needs paged attention; vLLM has no CPU wheel for this torch.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.scripts.held_out import add_options, greedy_accuracy
from benchmarks.peers.step_clock import HeldOut, StepClock, rows_of

MEDIA_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a split of a Mobula data set")
    parser.add_argument("--output", required=True)
    for name in ("prompts", "samples", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("kl", "temperature", "learning-rate"):
        parser.add_argument(f"--{name}", type=float, required=True)
    add_options(parser)
    asked = parser.parse_args()
    torch.set_num_threads(2)
    processor = AutoProcessor.from_pretrained(asked.model)
    # A sampled image token has no image: the forward pass of TRL then fails, and Mobula's samplers never draw one.
    tokenizer = getattr(processor, "tokenizer", processor)
    media = [n for n in tokenizer.convert_tokens_to_ids(MEDIA_TOKENS) if n not in (None, tokenizer.unk_token_id)]
    held_out = None
    if asked.accuracy:
        rows = [_row(row, asked.held_out.parent) for row in rows_of(asked.held_out)[: asked.held_out_rows]]
        measure = partial(greedy_accuracy, processor=processor, rows=rows, tokens=asked.tokens, banned=media)
        held_out = HeldOut(asked.accuracy, asked.interval, measure)
    clock = StepClock(held_out)

    def reward(completions: list[Any], completion_ids: list[list[int]], solution: list[str], **_: Any) -> list[float]:
        clock.counted(len(completions), sum(map(len, completion_ids)))
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [float(right in text) for right, text in zip(solution, texts, strict=True)]

    trainer = GRPOTrainer(
        model=asked.model,
        processing_class=processor,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([_row(row, asked.data.parent) for row in rows_of(asked.data)]),
        args=GRPOConfig(
            output_dir=asked.output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=asked.prompts * asked.samples,
            gradient_accumulation_steps=1,
            num_generations=asked.samples,
            max_completion_length=asked.tokens,
            generation_kwargs={"suppress_tokens": media} if media else None,
            max_steps=asked.steps,
            beta=asked.kl,
            temperature=asked.temperature,
            learning_rate=asked.learning_rate,
            lr_scheduler_type="constant",
            report_to="none",
            save_strategy="no",
            logging_steps=asked.steps,
            model_init_kwargs={"dtype": "float32"},
        ),
        callbacks=[clock],
    )
    trainer.train()
    clock.run.print()


def _row(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One prompt: the images first, then the text."""
    images = row.get("image", [])
    loaded = [Image.open(folder / name).convert("RGB") for name in ([images] if isinstance(images, str) else images)]
    prompt = [{"role": "user", "content": row["question"].replace("<image>", "")}]
    return {"prompt": prompt, "solution": row["solution"], **({"images": loaded} if loaded else {})}


if __name__ == "__main__":
    main()
