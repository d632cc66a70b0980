"""A learner and the transformers sampler: sample, train, push, with text, one and two images."""

from __future__ import annotations

import asyncio

from mobula.deploy.tools.gpu_check.context import Context, Figures
from mobula.deploy.tools.gpu_check.roles import open_model
from mobula.deploy.tools.gpu_check.training import train


def run(context: Context) -> Figures:
    return asyncio.run(train(context, open_model(context, "sampler=huggingface")))
