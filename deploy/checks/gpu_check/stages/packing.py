"""Packed rows compute what padded rows compute: the same loss, gradient norm and weights after a step."""

from __future__ import annotations

import torch

from mobula.cluster.weight_sync.transport import unpack_all
from mobula.deploy.checks.gpu_check.context import Context, Figures
from mobula.deploy.checks.gpu_check.roles import Model, open_checkpoint, open_model, sampled_groups
from mobula.learner.learner import Learner

CLOSE = {"float32": 1e-4, "bfloat16": 3e-2}  # of loss and gradient norm, relative, and of a step's weights
# At 1e-8 Adam turns the rounding of a gradient near 0 into a step as large as the learning rate.
WORDS = ("sampler=huggingface", "learner.adam_eps=1.0e-4", "learner.learning_rate=0.001")


def run(context: Context) -> Figures:
    """Compares float32 on every device, and on a GPU the dtype of its presets too."""
    figures: dict[str, float | int | str] = {}
    for dtype in ("float32", "bfloat16") if context.is_cuda else ("float32",):
        own = (*WORDS, f"resources.dtype={dtype}")
        padded = open_model(context, *own, "learner.packing=false")
        packed = open_checkpoint(context, padded.folder, *own, "learner.packing=true")
        figures[f"{dtype}_difference"] = _difference(padded, packed, CLOSE[dtype])
    return figures


def _difference(padded: Model, packed: Model, close: float) -> float:
    """Largest difference of the two, which is within `close`."""
    [groups] = sampled_groups(padded)
    outcomes = []
    for model in (padded, packed):
        learner = model.learner()
        metrics = learner.update(groups, 1).metrics
        outcomes.append((metrics["grad_norm"], weights(model, learner)))
        learner.close()
    (norm, before), (packed_norm, after) = outcomes
    norms = abs(packed_norm - norm) / norm
    off = {name: float((after[name].float() - tensor.float()).abs().max()) for name, tensor in before.items()}
    worst = max(off, key=off.__getitem__)
    assert norms <= close, f"gradient norms are {norm:.6g} by padded and {packed_norm:.6g} by packed rows"
    assert off[worst] <= close, f"{worst} differs by {off[worst]:.3g} after a step on packed rows"
    return max(norms, off[worst])


def weights(model: Model, learner: Learner) -> dict[str, torch.Tensor]:
    """The learner's weights as a push carries them, by name."""
    _, buckets = learner.export_weights(model.bucket_bytes)
    return {name: t.clone() for name, t in unpack_all(learner.manifest(), model.bucket_bytes, buckets)}
