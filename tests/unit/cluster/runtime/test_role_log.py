"""A worker's log has all that its process and its children write, process by process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mobula.cluster.runtime import ray_deaths
from mobula.cluster.runtime.ray_deaths import _log_of
from mobula.cluster.runtime.role_log import POINTER, opening, part_of, role_log, write_to

PROCESS = """
import logging, os, subprocess, sys
from pathlib import Path
from mobula.cluster.runtime.role_log import write_to

print("before", file=sys.stderr)
write_to(Path(sys.argv[1]), "rollout/0")
print("printed")
os.write(2, b"native\\n")
subprocess.run([sys.executable, "-c", "import sys; print('child', file=sys.stderr)"], check=True)
logging.getLogger("mobula.actors.rollout").info("ours")
logging.getLogger("library").info("dropped")
logging.getLogger("library").warning("a library warns")
raise SystemExit("the end")
"""


def run_process(path: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROCESS, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def test_everything_goes_to_the_file_and_the_log_before_names_it(tmp_path: Path) -> None:
    path = role_log(tmp_path / "logs", "rollout/0")
    assert path == tmp_path / "logs" / "rollout-0.log"
    done = run_process(path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == ["before", f"{POINTER}{path}"]
    first, *lines = path.read_text().splitlines()
    assert first.startswith("===== process ") and first.endswith(": rollout/0")
    assert [line for line in lines if "INFO" not in line and "WARNING" not in line] == [
        "printed", "native", "child", "the end",
    ]  # fmt: skip
    assert [line for line in lines if line.endswith("INFO mobula.actors.rollout: ours")]
    assert [line for line in lines if line.endswith("WARNING library: a library warns")]
    assert "dropped" not in path.read_text()


def test_a_process_that_follows_has_a_part_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.log"
    path.write_text(f"{opening(1)} on here: rollout/0\none\ntwo\n{opening(22)} on here: rollout/0\nthree\n")
    assert part_of(path, "1") == "one\ntwo"
    assert part_of(path, "22") == "three\n"
    assert part_of(path, "2") == path.read_text()


def test_the_cause_of_a_death_is_looked_for_where_the_process_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, by_ray = tmp_path / "rollout-0.log", tmp_path / "worker-22.err"
    own.write_text(f"{opening(1)} on here: rollout/0\nold\n{opening(22)} on here: rollout/0\n*** SIGSEGV received\n")
    by_ray.write_text(f":job_id:01\nfirst words\n{POINTER}{own}\n")
    monkeypatch.setattr(ray_deaths, "_path_of", lambda process_id: by_ray)
    assert _log_of("\tpid: 22") == (own, "first words\n*** SIGSEGV received")
    own.unlink()
    assert _log_of("\tpid: 22") == (by_ray, f"first words\n{POINTER}{own}")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(OSError, match="logs"):
        write_to(role_log(tmp_path / "logs", "reward/0"), "reward/0")
