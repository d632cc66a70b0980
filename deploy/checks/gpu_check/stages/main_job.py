"""The main job on the device: engine and learner at the same time, and in turns."""

from __future__ import annotations

from mobula.deploy.checks.gpu_check.context import Context, Figures
from mobula.deploy.checks.gpu_check.roles import run_job

PRESETS = {"cpu": ("laptop",), "cuda": ("gpu_1", "one_gpu_colocated")}


def run(context: Context) -> Figures:
    job_figures = [run_job(context, preset) for preset in PRESETS[context.device]]
    return {name: value for figures in job_figures for name, value in figures.items()}
