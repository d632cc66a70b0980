"""Sampler and learner free the device's memory, reload, and compute the same values as before."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from mobula.cluster.records.trajectory import Prompt
from mobula.deploy.checks.gpu_check.context import MIB, Context, Figures
from mobula.deploy.checks.gpu_check.roles import LocalActor, LocalSender, open_checkpoint, open_model, sample, scored
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import SMALL_TEXT

KEPT = 0.1  # most of the memory in use that may stay on the GPU: buffers of kernels
PARTS = ("policy", "optimizer")


def run(context: Context) -> Figures:
    return asyncio.run(_run(context))


async def _run(context: Context) -> Figures:
    own = "sampler=huggingface"  # on a GPU with a model that is large beside the buffers of kernels
    large = open_checkpoint(context, SMALL_TEXT(context.folder / "model"), own) if context.is_cuda else None
    model = large or open_model(context, own)
    actor, learner = await model.actor(), model.learner()
    prompt = model.prompts[-1]
    try:
        sync = model.weight_sync(LocalSender(learner), actor)
        await sync.publish(0)
        metrics = learner.update(scored(await sample(model, actor, seed=1)), 1).metrics
        assert metrics["grad_norm"] > 0, "the step has no gradient"  # the optimizer has a state from here on
        await sync.publish(1)
        awake, before = _allocated(context), await _logprobs(learner, actor, prompt)
        await actor.sleep()
        for part in PARTS:
            learner.offload(part)
        asleep = _allocated(context)
        assert asleep <= KEPT * awake, f"{asleep} of {awake} bytes stay allocated while all sleep"
        learner.onload()
        for tag in ("weights", "kv_cache"):
            await actor.wake_up(tag)
        after = await _logprobs(learner, actor, prompt)
        for name, was, now in zip(("learner", "sampler"), before, after, strict=True):
            assert np.array_equal(was, now), f"the {name} computes other log-probs than before it slept"
        assert learner.update(scored(await sample(model, actor, seed=2)), 2).metrics["grad_norm"] > 0
        return {"awake_mib": awake / MIB, "asleep_mib": asleep / MIB} if context.is_cuda else {}
    finally:
        learner.close()
        await actor.close()


def _allocated(context: Context) -> int:
    return torch.cuda.memory_allocated() if context.is_cuda else 0


async def _logprobs(learner: Learner, actor: LocalActor, prompt: Prompt) -> tuple[np.ndarray, np.ndarray]:
    return learner.sequence_logprobs(prompt), await actor.prompt_logprobs(prompt)
