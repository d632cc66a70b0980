"""The Python interface: the names that `import mobula` offers.

A run is a process of its own, so a notebook's event loop and the caller's Ray, logging and signal handlers stay as they
are. Interrupting the call stops the run in order: it writes a checkpoint, its summary and its report.

    config = mobula.load_config(["experiment=sums", "resources=laptop", "num_steps=20"])
    result = mobula.train(config)
    print(result.summary.accuracy_before, result.summary.accuracy_after)
    mobula.export(result.folder, output=Path("policy"))
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mobula.cluster.errors import MobulaError, PreflightError
from mobula.cluster.failures import escaped
from mobula.cluster.metrics.report.run_folder import REPORT_FILE, RunFolder, read_run_folder
from mobula.cluster.metrics.summary import Summary
from mobula.cluster.rollout.evaluation import EvaluationResult
from mobula.configs.load import dump_config, load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.cli.errors import INTERRUPTED, USER_ERROR
from mobula.deploy.planning.plan_command import MemoryPlan, make_plan

__all__ = ["RunResult", "evaluate", "export", "load_config", "plan", "train"]


@dataclass(frozen=True)
class RunResult:
    """Summary and files of a finished run."""

    folder: Path
    summary: Summary

    @classmethod
    def read(cls, folder: Path) -> RunResult:
        """Reads the result of the run in `folder`; another process may have started the run.

        Raises:
            ValueError: the folder has no summary, or a file in it cannot be read.
        """
        summary = read_run_folder(folder).summary
        if summary is None:
            raise ValueError(f"{folder} has no summary: the run goes on or its driver was killed (see `mobula report`)")
        return cls(folder, summary)

    @property
    def report(self) -> Path:
        return self.folder / REPORT_FILE

    def records(self) -> RunFolder:
        """Steps, evaluations, samples, faults and skipped rows, read from the folder."""
        return read_run_folder(self.folder)


def plan(config: RunConfig, *, nodes: str | None = None, cluster: Path | None = None) -> MemoryPlan:
    """Places the workers of `config` and adds up their memory, as `mobula plan` does.

    Args:
        nodes: short description of the nodes, such as `2x8x80GB`; this machine if neither is given.
        cluster: a YAML file that describes the nodes.

    Raises:
        PreflightError: CPUs, GPUs or memory do not suffice; the message names settings that would.
    """
    return make_plan(config, short=nodes, file=cluster)


def train(config: RunConfig) -> RunResult:
    """Runs the main job of `config` in a new process and waits for it; log lines go to `sys.stdout`.

    Raises:
        PreflightError: the run cannot start; no worker was started.
        MobulaError: the run failed. `RunResult.read(config.run_folder)` has the finished steps.
        KeyboardInterrupt: the call was interrupted; the run has written its checkpoint and report.
    """
    _run("train", config, [])
    return RunResult.read(config.run_folder)


def evaluate(config: RunConfig, *, output: Path | None = None) -> list[EvaluationResult]:
    """Scores `policy.model` on the held-out prompts of `config`; returns one result per suite.

    Args:
        output: directory for the results and the responses.

    Raises:
        PreflightError, MobulaError, KeyboardInterrupt: as for `train`.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = output or Path(folder)
        _run("evaluate", config, ["--output", str(target)])
        rows = json.loads((target / "evaluation.json").read_text(encoding="utf-8"))
    return [EvaluationResult(**row) for row in rows]


def export(
    run: Path | str,
    *,
    step: int | None = None,
    merge: bool = False,
    ema: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    output: Path | None = None,
) -> Path:
    """Writes the policy of a run's checkpoint for transformers or PEFT; returns the directory.

    Args:
        run: the run's folder, or its name below `runs`.
        step: the checkpoint; the newest one by default.
        merge: merge LoRA adapters into the weights.
        ema: export the exponential moving average of the weights (`learner.ema_decay`).
        dtype: the dtype of all tensors; that of `policy.model` by default.
        output: the directory to write; `export/` in the run folder by default.

    Raises:
        PreflightError: there is no such run or checkpoint, or the directory exists or cannot be written.
    """
    from mobula.deploy.run.export import export_policy  # it imports torch

    return export_policy(str(run), step, merge=merge, ema=ema, dtype=dtype, output=output).path


def _run(command: str, config: RunConfig, words: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "stderr", "w+", encoding="utf-8") as errors:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        call = [sys.executable, "-m", "mobula.deploy.cli", command, "--config", str(file), *words]
        # A process group of its own: Ctrl-C would reach the run too, and a second signal stops it without a checkpoint.
        with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0) as process:
            assert process.stdout is not None, "it is a pipe"
            try:
                for line in process.stdout:
                    sys.stdout.write(escaped(line))
                code = process.wait()
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
        errors.seek(0)
        text = errors.read().strip()
    if code == 0:
        return
    message = (
        re.split(r"^mobula: ", text, flags=re.MULTILINE)[-1]
        or f"`mobula {command}` ended with code {code} and no message"
    )
    if code == INTERRUPTED:
        raise KeyboardInterrupt(message)
    raise (PreflightError if code == USER_ERROR else MobulaError)(message)
