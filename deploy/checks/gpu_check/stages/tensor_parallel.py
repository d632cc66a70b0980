"""A vLLM engine over two GPUs and a learner on the first of them; pushes reach both ranks of the engine."""

from __future__ import annotations

import asyncio

from mobula.deploy.checks.gpu_check.context import Context, Figures
from mobula.deploy.checks.gpu_check.lone_engine import set_engine_environment
from mobula.deploy.checks.gpu_check.roles import open_model, train

SPLIT = ("resources.rollout.tensor_parallel=2", "resources.rollout.num_gpus=2")


def run(context: Context) -> Figures:
    """Without Ray, which would not place the engine beside a learner's share of a GPU on a node of two."""
    model = open_model(context, "sampler=vllm", *SPLIT)
    set_engine_environment(model.config)
    return asyncio.run(train(context, model))
