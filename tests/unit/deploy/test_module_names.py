"""A user's project may hold files with the names of our packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import deploy
import pytest

from mobula.rewards.functions import build_function
from mobula.rewards.hints import own_name
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

ROOT = Path(__file__).parents[3]
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks"}

SHOW = "import sys; sys.argv = ['mobula', 'show-config', 'experiment=digits']; import mobula_start; mobula_start.main()"


def run(words: list[str], folder: Path, python_path: str = "") -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = {"PYTHONPATH": python_path} if python_path else {}
    return subprocess.run([sys.executable, *words], cwd=folder, env=env | path, capture_output=True, text=True)


def test_the_protected_names_are_those_of_our_packages() -> None:
    assert set(deploy.OWN) == PACKAGES and deploy.ROOT == ROOT
    assert all(own_name(f"{name}:f") for name in PACKAGES) and not own_name("mine:f") and not own_name("rewardsX:f")


@pytest.mark.parametrize("name", ["rewards", "configs", "deploy"])
def test_commands_work_beside_a_file_or_a_package_of_such_a_name(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('the module of the user')")
    shown = run(["-c", SHOW], ROOT, str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    assert "prompts_per_step" in shown.stdout


def test_a_folder_of_such_a_name_without_a_module_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    shown = run(["-c", SHOW], ROOT, str(tmp_path))
    assert shown.returncode == 0, shown.stderr


def test_a_file_in_the_working_folder_is_seen_for_the_workers_of_ray(tmp_path: Path) -> None:
    (tmp_path / "learner.py").write_text("raise SystemExit('the module of the user')")
    program = f"import sys; sys.path.append({str(ROOT)!r}); import deploy; print(deploy.CLASHING)"
    shown = run(["-P", "-c", program], tmp_path)
    assert "learner.py" in shown.stdout, shown.stderr


def test_a_module_command_works_from_the_folder_of_a_project_and_children_find_ours(tmp_path: Path) -> None:
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "__init__.py").write_text("raise SystemExit('the package of the user')")
    program = (
        "import sys, runpy; sys.path.insert(0, ''); import deploy, os, subprocess, rewards.contract; "
        "assert deploy.CLASHING, deploy.CLASHING; "
        "subprocess.run([sys.executable, '-P', '-c', 'import mobula.rewards.contract'], check=True)"
    )
    shown = run(["-P", "-c", program], tmp_path)
    assert shown.returncode == 0, shown.stderr


def test_without_a_clash_nothing_changes(tmp_path: Path) -> None:
    program = "import sys; before = list(sys.path); import deploy; assert sys.path == before and not deploy.CLASHING"
    shown = run(["-P", "-c", program], tmp_path)
    assert shown.returncode == 0, shown.stderr


def test_a_reward_function_of_such_a_module_is_refused_with_the_way_out() -> None:
    isolated = IsolatedProcess(timeout_s=20, start_timeout_s=60)
    with pytest.raises(ValueError, match=r"`rewards` is a package of mobula.*path/to/rewards\.py:function"):
        build_function("rewards:score", {}, Tools(isolated, "cpu", "float32"))
    isolated.close()


def test_a_file_that_is_named_by_its_path_imports_its_siblings(tmp_path: Path) -> None:
    (tmp_path / "helpers_of_it.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "rewards.py").write_text("from helpers_of_it import half\ndef score(x):\n    return half(x)\n")
    process = IsolatedProcess(timeout_s=20, start_timeout_s=60)
    try:
        assert process.call(f"{tmp_path}/rewards.py:score", 3.0) == 1.5
    finally:
        process.close()
