"""A vLLM engine and a learner on one device: parity, pushes and their canary, with text, one and two images."""

from __future__ import annotations

import asyncio

from mobula.deploy.checks.gpu_check.context import Context, Figures
from mobula.deploy.checks.gpu_check.lone_engine import set_engine_environment
from mobula.deploy.checks.gpu_check.roles import open_model, train


def run(context: Context) -> Figures:
    """With the engine settings of the preset: on a GPU under CUDA graphs."""
    model = open_model(context, "sampler=vllm")
    set_engine_environment(model.config)
    return asyncio.run(train(context, model))
