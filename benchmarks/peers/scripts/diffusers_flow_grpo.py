"""Flow-GRPO's inner loop, written with diffusers and torch as its paper and its README describe it.

Source: Flow-GRPO, arXiv:2505.05470. flow_grpo itself cannot be installed beside these versions: it asks for torch 2.6
and diffusers 0.33, and its package has no modules. Sampling is one batch of all rows; training goes through the steps
of a batch one by one, and steps the optimizer once a batch.
"""

from __future__ import annotations

import argparse
import io
import math
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging
from torch import Tensor

from benchmarks.peers.step_clock import Run, rows_of

JPEG_QUALITY, JPEG_SCALE = 95, 500.0


@dataclass(frozen=True)
class Batch:
    """Rows of a step, all their denoising steps, and the prompts that they share."""

    latents: Tensor  # [N, T + 1, ...]
    logprobs: Tensor  # [N, T]
    embeds: Tensor  # [N, L, D]
    pooled: Tensor  # [N, P]
    advantages: Tensor  # [N]

    def rows(self, index: Tensor) -> Batch:
        fields = (self.latents, self.logprobs, self.embeds, self.pooled, self.advantages)
        return Batch(*(field[index] for field in fields))


class FlowGrpo:
    """Samples, scores and trains one step at a time."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._pipeline = DiffusionPipeline.from_pretrained(asked.model)
        self._model: Any = self._pipeline.transformer
        self._pipeline.scheduler.set_timesteps(asked.denoising_steps)
        self._times, self._sigmas = self._pipeline.scheduler.timesteps, self._pipeline.scheduler.sigmas
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=asked.learning_rate, weight_decay=0.0)

    @torch.no_grad()
    def sample(self, texts: list[str]) -> Batch:
        """`samples` images of each text."""
        asked = self._asked
        encoded = self._pipeline.encode_prompt(
            texts, texts, texts, max_sequence_length=asked.text_tokens, do_classifier_free_guidance=False
        )
        embeds, pooled = (encoded[n].repeat_interleave(asked.samples, 0) for n in (0, 2))
        latents = torch.randn(len(embeds), self._model.config.in_channels, asked.side, asked.side)
        kept, logprobs = [latents], []
        for step in range(asked.denoising_steps):
            mean, deviation = self._step(latents, step, embeds, pooled)
            latents = mean + deviation * torch.randn_like(mean)
            kept.append(latents)
            logprobs.append(_logprobs(latents, mean, deviation))
        rewards = torch.tensor([_jpeg_reward(image) for image in self._decoded(latents)]).view(len(texts), -1)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(correction=0) + 1e-4)
        return Batch(torch.stack(kept, 1), torch.stack(logprobs, 1), embeds, pooled, advantages.flatten())

    def train(self, batch: Batch) -> None:
        """One optimizer step for each of `minibatches` parts."""
        asked = self._asked
        for part in torch.randperm(len(batch.advantages)).chunk(asked.minibatches):
            rows = batch.rows(part)
            for step in range(asked.trained_steps):
                mean, deviation = self._step(rows.latents[:, step], step, rows.embeds, rows.pooled)
                ratio = torch.exp(_logprobs(rows.latents[:, step + 1], mean, deviation) - rows.logprobs[:, step])
                advantages = rows.advantages.clamp(-5, 5)
                clipped = ratio.clamp(1 - asked.clip, 1 + asked.clip)
                loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean() / asked.trained_steps
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _step(self, latents: Tensor, step: int, embeds: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the next latents."""
        velocity = self._model(
            hidden_states=latents,
            timestep=self._times[step].expand(len(latents)),
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        sigma, following = self._sigmas[step], self._sigmas[step + 1]
        dt = following - sigma
        rate = self._asked.noise * torch.sqrt(sigma / (1 - torch.minimum(sigma, self._sigmas[1])))
        pull = rate**2 / (2 * sigma)
        mean = latents * (1 + pull * dt) + velocity * (1 + pull * (1 - sigma)) * dt
        return mean, rate * torch.sqrt(-dt)

    def _decoded(self, latents: Tensor) -> list[Any]:
        vae = self._pipeline.vae
        shift = vae.config.get("shift_factor") or 0.0
        pixels = vae.decode(latents / vae.config.scaling_factor + shift, return_dict=False)[0]
        return self._pipeline.image_processor.postprocess(pixels, output_type="pil")


def _logprobs(latents: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """[N]: the mean over all numbers of the latents."""
    squares = (latents.detach() - mean) ** 2 / (2 * deviation**2)
    return (-squares - torch.log(deviation) - 0.5 * math.log(2 * math.pi)).flatten(1).mean(1)


def _jpeg_reward(image: Any) -> float:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return -file.tell() / 1000 / JPEG_SCALE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a split of a Mobula data set")
    parser.add_argument("--output", required=True)
    numbers = ("prompts", "samples", "steps", "minibatches", "denoising-steps", "trained-steps", "text-tokens", "side")
    for name in numbers:
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("noise", "clip", "learning-rate"):
        parser.add_argument(f"--{name}", type=float, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(2)
    logging.set_verbosity_error()  # each text is longer than its tokens
    texts = [row["question"] for row in rows_of(asked.data)]
    loop, run, random = FlowGrpo(asked), Run(), Random(0)
    for _ in range(asked.steps):
        since = time.perf_counter()
        loop.train(loop.sample(random.sample(texts, asked.prompts)))
        run.seconds.append(time.perf_counter() - since)
        run.samples.append(asked.prompts * asked.samples)
        run.tokens.append(asked.prompts * asked.samples * asked.trained_steps)
    run.print()


if __name__ == "__main__":
    main()
