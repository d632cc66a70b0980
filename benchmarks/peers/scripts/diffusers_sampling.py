"""diffusers' own pipeline: images of one prompt a call, by the ODE; each text is encoded once, before the clock."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging

from benchmarks.peers.step_clock import Run, rows_of


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a split of a Mobula data set")
    parser.add_argument("--output", required=True)
    for name in ("images", "steps", "denoising-steps", "text-tokens", "side"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--guidance", type=float, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # as an engine of `resources=laptop` has
    logging.set_verbosity_error()  # each text is longer than its tokens
    pipeline = DiffusionPipeline.from_pretrained(asked.model)
    pipeline.set_progress_bar_config(disable=True)
    texts = [row["question"] for row in rows_of(asked.data)]
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    encoded = [
        pipeline.encode_prompt(text, text, text, max_sequence_length=asked.text_tokens) for text in texts[: asked.steps]
    ]
    run = Run()
    for step in range(asked.steps):
        since = time.perf_counter()
        given = zip(names, encoded[step % len(encoded)], strict=True)
        rows = {name: tensor.expand(asked.images, *tensor.shape[1:]) for name, tensor in given if tensor is not None}
        pipeline(
            **rows,
            guidance_scale=asked.guidance,
            num_inference_steps=asked.denoising_steps,
            height=asked.side,
            width=asked.side,
        )
        run.seconds.append(time.perf_counter() - since)
        run.samples.append(asked.images)
        run.tokens.append(asked.images * asked.denoising_steps)
    run.print()


if __name__ == "__main__":
    main()
