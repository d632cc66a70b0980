"""Mobula is one package: files of a user's project may have the names of its directories."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mobula.rewards.isolation.process import IsolatedProcess

ROOT = Path(__file__).parents[3]
PACKAGES = sorted({path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks"})


def run(words: list[str], folder: Path, python_path: str = "") -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = {"PYTHONPATH": python_path} if python_path else {}
    return subprocess.run([sys.executable, *words], cwd=folder, env=env | path, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a module of each of our directories' names, none of which can be imported."""
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the module of the user')")
    return tmp_path


@pytest.mark.parametrize("on_path", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_commands_work_in_a_project_with_files_of_such_names(project: Path, on_path: bool) -> None:
    words = ["-m", "mobula.deploy.cli", "show-config", "experiment=digits"]
    shown = run(words, project, str(project) if on_path else "")
    assert shown.returncode == 0, shown.stderr
    assert "prompts_per_step" in shown.stdout


@pytest.mark.parametrize("word", ["rewards:score", "{project}/rewards.py:score"])
def test_a_reward_function_may_be_in_a_module_of_such_a_name(project: Path, word: str) -> None:
    (project / "configs.py").write_text("HALF = 0.5\n")
    (project / "rewards.py").write_text("from configs import HALF\ndef score(x):\n    return x * HALF\n")
    program = (
        "from mobula.rewards.isolation.process import IsolatedProcess as P; import sys; "
        "p = P(timeout_s=20, start_timeout_s=60); print(p.call(sys.argv[1], 3.0)); p.close()"
    )
    shown = run(["-c", program, word.format(project=project)], project, str(project))
    assert shown.stdout.strip() == "1.5", shown.stderr


def test_a_checkout_that_is_not_installed_runs_its_own_code() -> None:
    """Without `site` no installed package is found."""
    program = "import sys; sys.path.insert(0, '.'); import deploy, mobula.cluster; print(mobula.cluster.__path__[0])"
    shown = run(["-S", "-c", program], ROOT)
    assert shown.stdout.strip() == str(ROOT / "cluster"), shown.stderr


def test_a_file_that_is_named_by_its_path_imports_its_siblings(tmp_path: Path) -> None:
    (tmp_path / "helpers_of_it.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "rewards.py").write_text("from helpers_of_it import half\ndef score(x):\n    return half(x)\n")
    process = IsolatedProcess(timeout_s=20, start_timeout_s=60)
    try:
        assert process.call(f"{tmp_path}/rewards.py:score", 3.0) == 1.5
    finally:
        process.close()
