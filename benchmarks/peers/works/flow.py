"""Works of flow models: sampling, and a whole step of Flow-GRPO."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.rounds import Side
from benchmarks.peers.works.work import (
    IN_TURNS,
    NUM_WARMUP,
    OURS,
    OVERLAPPED,
    STEADY,
    SYNCHRONOUS,
    TURNS,
    Work,
    mobula_side,
    peer_side,
)
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import ensure_data, ensure_model

GLYPHS = ("experiment=glyphs_grpo", "warm_start.num_steps=0", "rewards=jpeg_size")
PEER = "diffusers"


def sampling(name: str, *, num_steps: int) -> Work:
    """A call is a batch of the sampler of `glyphs_grpo`: the images of several prompts."""

    def sides(num_steps: int) -> Sequence[Side]:
        config = _prepared(GLYPHS)
        calls, images = num_steps + NUM_WARMUP + 1, config.sampler.flow.batch_size
        words = (sys.executable, "-m", "benchmarks.peers.mobula_sampling", str(calls), *GLYPHS)
        asked = {**_asked(config), "steps": calls, "images": images, "guidance": config.sampler.flow.guidance}
        return (
            Side(OURS, lambda folder: (*words, f"folder={folder}")),
            peer_side("diffusers", PEER, "diffusers_sampling", asked),
        )

    return Work(
        name,
        PEER,
        num_steps,
        sides,
        {OURS: 0.95},
        equal="checkpoint, images a call, denoising steps, guidance, texts encoded before, one thread",
        unequal="we draw from Gaussians, score each step and write PNG files; the pipeline follows the ODE",
    )


def flow_grpo(name: str, *, num_steps: int) -> Work:
    """Compares a whole step of `glyphs_grpo`, with a cheap reward, to the same loop in one process."""
    # Not `LEARNING_RATE`: with it the gradients behind the output, which begins at zero, are denormal numbers.
    steady = (word for word in STEADY if not word.startswith("learner.learning_rate="))
    own = (*GLYPHS, "evaluation.num_samples=1", *steady, "learner.learning_rate=3e-4")
    overlapped = ("resources=laptop_overlapped", "learner=single", "algorithm.max_staleness=1")

    def sides(num_steps: int) -> Sequence[Side]:
        config = _prepared(own)
        flow, algorithm = config.sampler.flow, config.algorithm
        asked = {
            **_asked(config),
            "prompts": algorithm.prompts_per_step,
            "samples": algorithm.samples_per_prompt,
            "steps": num_steps + NUM_WARMUP + 1,
            "minibatches": algorithm.num_minibatches,
            "trained-steps": flow.window_end - flow.window_start,
            "noise": flow.noise_level,
            "clip": algorithm.losses.ppo_clip.clip_low,
            "learning-rate": config.learner.learning_rate,
        }
        return (
            mobula_side(OVERLAPPED, "train", (*own, *overlapped), num_steps, num_ahead=1),
            mobula_side(SYNCHRONOUS, "train", (*own, *TURNS), num_steps),
            peer_side("flow_grpo's inner loop, written with diffusers", PEER, "diffusers_flow_grpo", asked),
        )

    return Work(
        name,
        PEER,
        num_steps,
        sides,
        {OVERLAPPED: 1.0, SYNCHRONOUS: 1.0},
        equal="checkpoint, prompts, images and trained denoising steps of a step, optimizer steps (AdamW), JPEG reward",
        unequal=f"overlapped trains images one version old; {IN_TURNS}; the loop adds noise to the last step too",
    )


def _prepared(words: Sequence[str]) -> RunConfig:
    config = load_config(words)
    ensure_model(config)
    ensure_data(config)
    return config


def _asked(config: RunConfig) -> dict[str, object]:
    flow = config.sampler.flow
    return {
        "model": config.policy.model,
        "data": Path(config.data.path) / "train.jsonl",
        "denoising-steps": flow.num_steps,
        "text-tokens": flow.max_text_tokens,
        "side": flow.height,
    }
