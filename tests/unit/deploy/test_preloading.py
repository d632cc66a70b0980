"""Workers that are forked from a process with their imports are like workers that import by themselves."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mobula.configs.load import load_config
from mobula.deploy.preloading.preloaded import ENGINE, ROLES, Preloaded, preloaded

SCRIPT = """
import json, os, random, signal, sys
path, before = sys.path[0], set(sys.modules)
import numpy, ray, torch
print(json.dumps({
    "arguments": sys.argv[1:], "path": path, "folder": os.getcwd(), "mode": os.environ["MODE"], "input": input(),
    "threads": torch.get_num_threads(), "draws": [random.random(), float(numpy.random.rand())],
    "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "names": sorted(os.environ),
    "modules": [name for name in before if name.startswith("mobula.")], "has_ray": "ray._raylet" in before,
    "leads_group": os.getpgrp() == os.getpid(),
    "loaded_with": open(f"/proc/{os.getppid()}/environ").read().split("\\0"),
}))
print("an error", file=sys.stderr)
"""


def run(command: str, script: Path, folder: Path, *, threads: int = 1) -> dict[str, Any]:
    """Runs the script as Ray runs a worker, until its output is closed."""
    env = {**os.environ, "MODE": "worker", "OMP_NUM_THREADS": str(threads)}
    call = [*shlex.split(command), str(script), "--port", "1 2"]
    done = subprocess.run(call, input="text\n", capture_output=True, text=True, env=env, cwd=folder, check=True)
    assert "an error" in done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_workers_are_forked_with_their_modules_and_have_everything_else_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with preloaded(load_config(["experiment=digits"])) as workers:
        assert workers is not None
        role = run(workers.python("learner"), script, tmp_path)
        engines = [run(workers.python("rollout"), script, tmp_path, threads=2) for _ in range(2)]
        alone = run(shlex.quote(sys.executable), script, tmp_path)
    for seen in (role, *engines, alone):
        assert (seen["arguments"], seen["path"], seen["folder"]) == (["--port", "1 2"], str(tmp_path), str(tmp_path))
        assert (seen["mode"], seen["input"], seen["children"], seen["has_ray"]) == ("worker", "text", True, False)
    assert set(ROLES) <= set(role["modules"]) and ENGINE not in role["modules"] and alone["modules"] == []
    assert all({*ROLES, ENGINE} <= set(engine["modules"]) for engine in engines)
    assert all(seen["leads_group"] for seen in (role, *engines)), "Ray ends the group of a worker with the worker"
    assert (role["threads"], engines[0]["threads"]) == (1, 2)
    for seen in (role, *engines):
        assert "OMP_WAIT_POLICY=PASSIVE" in seen["loaded_with"], "OpenMP reads it when torch is imported"
    assert all(a != b for a, b in zip(engines[0]["draws"], engines[1]["draws"], strict=True))
    assert set(role["names"]) <= set(alone["names"])
    assert not workers.roles.parent.exists()


def test_without_a_server_a_worker_imports_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    missing = Preloaded(tmp_path / "none", tmp_path / "none")
    seen = run(missing.python("learner"), script, tmp_path)
    assert (seen["arguments"], seen["input"], seen["modules"]) == (["--port", "1 2"], "text", [])


@pytest.mark.parametrize("words", [["resources=gpu_2"], ["resources.address=10.0.0.1:6379"]])
def test_workers_on_gpus_and_on_other_machines_import_by_themselves(words: list[str]) -> None:
    with preloaded(load_config(["experiment=digits", *words])) as workers:
        assert workers is None
