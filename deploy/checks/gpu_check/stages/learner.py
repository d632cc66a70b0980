"""A learner and the transformers sampler: sample, train, push, with text, one and two images."""

from __future__ import annotations

import asyncio

from mobula.deploy.checks.gpu_check.context import Context, Figures
from mobula.deploy.checks.gpu_check.roles import open_model, train


def run(context: Context) -> Figures:
    return asyncio.run(train(context, open_model(context, "sampler=huggingface")))
