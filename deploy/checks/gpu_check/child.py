"""Runs one stage in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from mobula.deploy.checks.gpu_check.check import Outcome, StageResult, stage_named


def main(name: str, device: str, folder: str, result: str) -> None:
    from mobula.deploy.checks.gpu_check.context import Context, NotHereError

    module = import_module(f"mobula.deploy.checks.gpu_check.{stage_named(name).module}")
    try:
        figures = getattr(module, f"check_{name}")(Context(device, Path(folder)))
        outcome = StageResult(Outcome.PASSED, figures=dict(figures))
    except NotHereError as error:
        outcome = StageResult(Outcome.NOT_HERE, str(error))
    except Exception as error:  # a failed row, whatever it is; the traceback goes to the log of the stage
        traceback.print_exc()
        outcome = StageResult(Outcome.FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}")
    Path(result).write_text(json.dumps(asdict(outcome)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an interpreter that ends in order is aborted by threads of an engine's libraries
