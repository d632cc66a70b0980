"""The command `mobula gpu-check`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


def gpu_check(
    device: Annotated[Device, typer.Option(help="The device that is checked.")] = Device.CUDA,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Run this stage, finished or not; may be repeated."),
    ] = None,
    run_all: Annotated[bool, typer.Option("--all", help="Long stages too where the device is a CPU.")] = False,
    minutes: Annotated[float | None, typer.Option(min=0.5, help="Time of this call; the next one goes on.")] = None,
    folder: Annotated[Path, typer.Option(help="Where results and logs go.")] = Path("runs/gpu-check"),
) -> None:
    """Check a machine stage by stage: torch, learner, packing, FSDP2, flow, memory, vLLM, NCCL, the main job, speed.

    Each stage runs in a separate process and is one row: passed, failed with the cause, or not here with what is
    missing. `gpu_check.json` in the folder keeps finished stages, which the next call skips. Without Ray, vLLM, Hydra
    and this command `python -m deploy.tools.gpu_check` does the same from a checkout. Exits with 1 if a stage failed.
    """
    from mobula.deploy.checks.gpu_check.__main__ import run_check
    from mobula.deploy.checks.gpu_check.check import CheckOptions

    budget_s = None if minutes is None else 60 * minutes
    raise typer.Exit(run_check(CheckOptions(device.value, folder, tuple(only or ()), run_all, budget_s)))
