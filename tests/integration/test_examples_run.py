"""The scripts of examples/ train: each runs as a user starts it, on the CPU, with two steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import BARE, REPOSITORY, Job

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.examples.digits.digits import write_digits
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(900)]

EXEC = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
SMALLER = ("num_steps=2", "evaluation.num_prompts=16", *BARE)
SHORT = ("sampler.max_tokens=40", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4")
MOBULA = """#!{python}
import os, sys
sys.path.insert(0, os.getcwd())
from mobula.configs.overrides import overridden

command, *words = sys.argv[1:]
os.execv(sys.executable, [sys.executable, "-m", "mobula.deploy.cli", command, *overridden(words, {words!r})])
"""


def finished(script: str, folder: Path, *words: str) -> Path:
    """Run a script with `words` in place of its own for the same keys; returns the run's folder."""
    mobula = folder / "mobula"
    mobula.write_text(MOBULA.format(python=sys.executable, words=[*SMALLER, *words, f"folder={folder / 'runs'}"]))
    mobula.chmod(0o755)
    job = Job(folder, ())
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"MOBULA": mobula, "MODEL": folder / "model", "DATA": folder / "data"}.items():
            patched.setenv(name, str(value))
        patched.setenv("RESOURCES", "laptop")
        process = job.start_script("-c", EXEC, str(REPOSITORY / "examples" / script))
    with job:
        job.finish(process)
    [found] = (path for path in (folder / "runs").iterdir() if path.is_dir() and not path.is_symlink())
    return found


def check(run_folder: Path) -> None:
    summary = read_run_folder(run_folder).summary
    assert (summary.status, summary.version) == ("done", 2)
    assert (run_folder / "report.html").is_file()


@pytest.mark.parametrize("script", ["digits.sh", "asynchronous.sh"])
def test_an_example_on_the_digits_trains(script: str, tmp_path: Path) -> None:
    check(finished(script, tmp_path, f"data.path={tmp_path / 'digits'}"))


def test_the_example_for_a_checkpoint_and_data_of_ones_own_trains(tmp_path: Path) -> None:
    write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    write_digits(tmp_path / "data", task="digits")
    check(finished("own_model.sh", tmp_path, *SHORT))
