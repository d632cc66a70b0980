"""The main job on two GPUs: pushes go over NCCL from the learner's GPU to the engine's."""

from __future__ import annotations

from mobula.deploy.checks.gpu_check.context import Context, Figures
from mobula.deploy.checks.gpu_check.roles import run_job


def run(context: Context) -> Figures:
    return run_job(context, "two_gpu")
