"""Two steps of training with pushes between them, as the stages with an engine run them."""

from __future__ import annotations

import time
from unittest.mock import patch

import numpy as np
import torch

from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.transport import TransferGroup
from mobula.deploy.tools.gpu_check.context import Context, Figures
from mobula.deploy.tools.gpu_check.roles import LocalActor, LocalSender, Model, gap, sample, scored
from mobula.learner.learner import Learner

NUM_STEPS = 2
# nat, mean over tokens: engine and learner of the same weights. In bfloat16 as weight_sync.canary_tolerance: a released
# model of 135 M differs by 0.12 on the tokens of prompts.
CLOSE = {"float32": 1e-3, "bfloat16": 0.3}
MOVED = 1e-3  # nat: least change of a log-prob by a step


class PlantingSender(LocalSender):
    """A sender of whose pushes one bit of the first tensor arrives stale while `plants`."""

    plants = False

    async def send_weights(
        self, bucket_bytes: int, epoch: int, step: VersionStep | None = None
    ) -> PushedChanges | None:
        broadcast = TransferGroup.broadcast

        def stale(group: TransferGroup, buffer: torch.Tensor, step: str) -> None:
            if self.plants and group.rank == TransferGroup.SENDER and step.startswith("weight bucket 0 "):
                buffer = buffer.clone()
                buffer[0] ^= 1
            broadcast(group, buffer, step)

        with patch.object(TransferGroup, "broadcast", stale):
            return await super().send_weights(bucket_bytes, epoch, step)


async def train(context: Context, model: Model) -> Figures:
    """Sample, train and push; engine and learner agree before and after, and each push changes what is sampled. One bit
    of the last push arrives stale, which its digest shows, and the push is sent again.

    Raises:
        AssertionError, MobulaError: they do not.
    """
    context.restart_peak()
    learner = model.learner()
    actor = await model.actor()
    try:
        return await _train(context, model, learner, actor)
    finally:
        learner.close()
        await actor.close()


async def _train(context: Context, model: Model, learner: Learner, actor: LocalActor) -> Figures:
    close = CLOSE[model.config.resources.dtype]
    sender = PlantingSender(learner)
    sync = model.weight_sync(sender, actor)
    await sync.publish(0)
    gaps, step_s, push_s = [], [], []
    for version in range(1, NUM_STEPS + 1):
        groups = await sample(model, actor, seed=version)
        started, before = time.perf_counter(), learner.sequence_logprobs(model.prompts[0])
        report = learner.update(scored(groups), version)
        step_s.append(time.perf_counter() - started)
        gaps.append(report.metrics["logprob_gap_mean"])
        assert gaps[-1] <= close, f"sampled tokens: engine and learner differ by {gaps[-1]:.3g} nat, {close:g} is close"
        assert report.metrics["skipped"] == 0, "the gradient is not finite"
        moved = float(np.abs(learner.sequence_logprobs(model.prompts[0]) - before).max())
        assert moved > MOVED, f"step {version} moved no log-prob by more than {moved:.3g} nat"
        sender.plants = version == NUM_STEPS
        started = time.perf_counter()
        assert await sync.publish(version) == version, "the push made another version"
        push_s.append(time.perf_counter() - started)
        assert sender.num_exported == sender.plants, f"push {version} was sent again {sender.num_exported} times"
        difference = float((await gap(model, learner, actor)).mean())
        assert difference <= close, (
            f"after push {version}: engine and learner differ by {difference:.3g} nat, {close:g} is close"
        )
    figures = {"gap_nat": max(gaps), "gap_after_push_nat": difference, "step_s": min(step_s), "push_s": min(push_s)}
    media = sorted({handle.modality for prompt in model.prompts for handle in prompt.media})
    return {
        "dtype": model.config.resources.dtype,
        "media": " ".join(media) or "none",
        **figures,
        **context.peak_figures(),
    }
