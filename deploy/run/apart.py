"""Runs a command of `mobula` in a separate process."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from mobula.cluster.errors import INTERRUPTED, USER_ERROR, MobulaError, PreflightError
from mobula.cluster.failures import escaped
from mobula.cluster.metrics.report.run_folder import METRICS_FILE
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import StepRecord
from mobula.configs.load import dump_config
from mobula.configs.schema import RunConfig
from mobula.deploy.host.terminal import signals_raise

POLL_S = 0.2


def run_apart(
    command: str, config: RunConfig, words: Sequence[str], on_step: Callable[[StepRecord], object] | None = None
) -> None:
    """Runs the command with `config`; ending this process ends the run in order, with a checkpoint.

    Raises:
        MobulaError: the command failed; PreflightError if the configuration is at fault.
        KeyboardInterrupt: the command was interrupted.
    """
    with (
        signals_raise(),
        tempfile.TemporaryDirectory() as folder,
        open(Path(folder) / "stderr", "w+", encoding="utf-8") as errors,
    ):
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        call = [sys.executable, "-m", "mobula.deploy.cli", command, "--config", str(file), *words]
        steps = _new_steps(config.run_folder / METRICS_FILE)
        next(steps)  # those that it resumes from
        # A separate process group: Ctrl-C would reach the run too, and a second signal stops it without a checkpoint.
        with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0) as process:
            output = threading.Thread(target=_copy, args=(process.stdout,), daemon=True, name="output of the run")
            output.start()
            try:
                has_ended = False
                while not has_ended:
                    has_ended = process.poll() is not None
                    if on_step is not None:
                        for record in next(steps):
                            on_step(record)
                    time.sleep(0 if has_ended else POLL_S)
                output.join()
            except BaseException:
                process.terminate()
                process.wait()
                raise
        errors.seek(0)
        text = errors.read().strip()
    if process.returncode == 0:
        return
    message = (
        re.split(r"^mobula: ", text, flags=re.MULTILINE)[-1]
        or f"`mobula {command}` ended with code {process.returncode} and no message"
    )
    if process.returncode == INTERRUPTED:
        raise KeyboardInterrupt(message)
    raise (PreflightError if process.returncode == USER_ERROR else MobulaError)(message)


def _copy(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(escaped(line))


def _new_steps(file: Path) -> Iterator[Sequence[StepRecord]]:
    """Yields the steps that a run has added to its metrics since the last time; reads a file that has grown."""
    num_seen, num_bytes, steps = 0, 0, list[StepRecord]()
    while True:
        size = file.stat().st_size if file.is_file() else 0
        if size != num_bytes:
            steps = [record for record in read_records(file) if isinstance(record, StepRecord)]
        yield steps[num_seen:]
        num_seen, num_bytes = len(steps), size
