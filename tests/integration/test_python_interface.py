"""`import mobula`: the notebook of examples/, and errors of a run as exceptions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mobula
from mobula.cluster.errors import PreflightError

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.py"
SMALLER = (
    "num_steps=2", "warm_start.num_steps=10", "evaluation.num_prompts=16", "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=4", "resources.object_store_bytes=268435456", "timeouts.start_s=500",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_trains_exports_and_evaluates(tmp_path: Path) -> None:
    """As a script; each call starts a run of its own, also where an event loop runs as in a notebook."""
    text = NOTEBOOK.read_text(encoding="utf-8")
    text = text.replace('"resources=laptop"', '"resources=laptop", ' + ", ".join(map(repr, SMALLER)))
    text = text.replace('        "num_steps=20",\n', "")
    assert "num_steps=20" not in text
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    (tmp_path / "notebook.py").write_text(f"import asyncio\nasync def cells():\n{lines}\nasyncio.run(cells())\n")
    done = subprocess.run([sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2: mean reward" in done.stdout and "host memory: " in done.stdout
    assert "runs/notebook-policy: accuracy " in done.stdout.splitlines()[-1]
    run = mobula.Run(tmp_path / "runs" / "notebook")
    assert (run.summary.status, run.summary.version, run.report.is_file()) == ("done", 2, True)
    assert run.metrics["step"].to_pylist() == [1, 2] and run.samples and "<iframe" in run.plot()._repr_html_()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_a_checkpoint(number: signal.Signals, tmp_path: Path, usual_signals: None) -> None:
    """The interrupt of a terminal reaches every process of its group, and the run has to be asked once."""
    words = ["experiment=digits", "resources=laptop", "name=cut", *SMALLER[1:], "num_steps=1000"]
    program = f"import mobula\nmobula.train(mobula.load_config({words!r}))"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "step 1/1000" in line:
                os.killpg(process.pid, number)
    output = "".join(lines)
    assert "KeyboardInterrupt" in output and "stopping at once" not in output, output
    result = mobula.Run(tmp_path / "runs" / "cut")
    assert result.summary.status == "stopped"
    assert (result.folder / "checkpoints" / f"step-{result.summary.version:06d}").is_dir()


def test_a_run_that_cannot_start_raises_what_the_command_says(tmp_path: Path) -> None:
    config = mobula.load_config(["experiment=digits", f"folder={tmp_path}", f"data.path={tmp_path}"])
    with pytest.raises(PreflightError, match="has no dataset.json, so it is no digits dataset"):
        mobula.train(config)


def test_a_run_without_a_summary_says_so(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="there is no run in"):
        mobula.Run(tmp_path)
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(ValueError, match="has no summary"):
        _ = mobula.Run(tmp_path).summary


def test_only_the_interface_is_offered() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        mobula.trian  # noqa: B018
