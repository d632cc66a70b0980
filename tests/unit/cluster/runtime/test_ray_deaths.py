"""What Ray reports of an actor that ended becomes one line that names the cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RayActorError

from cluster.runtime import ray_deaths
from cluster.runtime.ray_deaths import actor_death

HEAD = "The actor died unexpectedly before finishing this task.\n\tclass_name: Learner\n\tactor_id: 4f\n\tpid: 4711\n"
DEAD = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
NO_WORD = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process"
)
BY_RAY = "The actor is dead because it was killed by `ray.kill`."
IN_INIT = """The actor died because of an error raised in its creation task, \x1b[36mray::W.init()\x1b[39m (pid=4711)
  File "/app/rewards/components.py", line 12, in __init__
    raise ValueError("no such reward")
ValueError: no such reward"""
IN_LOADING = (
    HEAD
    + DEAD
    + """Worker exits unexpectedly. Traceback (most recent call last):
  File "/app/site-packages/ray/_private/function_manager.py", line 696, in _load_actor_class_from_gcs
ModuleNotFoundError: No module named 'mine'

An unexpected internal error occurred while the worker was executing a task."""
)
SEGFAULT = """:job_id:01000000
*** SIGSEGV received at time=1795538915 on cpu 1 ***
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/app/site-packages/torch/nn/functional.py", line 519 in linear
  File "/app/site-packages/vllm/model.py", line 16 in forward
"""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where process 4711 wrote its stderr, on a node that it shares with this process."""
    path = tmp_path / "worker-4711.err"
    path.write_text(":job_id:01000000\n")
    monkeypatch.setattr(ray_deaths, "_path_of", lambda process_id: path if process_id == "4711" else None)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + DEAD + NO_WORD, "its process 4711 ended without a word, as after SIGKILL or out of memory"),
        (
            HEAD + DEAD + "Worker exits by exit(3).",
            "its process 4711 ended (Ray: SYSTEM_ERROR, Worker exits by exit(3))",
        ),
        (f"{HEAD}{BY_RAY}\nThe actor never ran.", BY_RAY),
        (IN_LOADING, "ModuleNotFoundError: No module named 'mine' at ray/_private/function_manager.py:696"),
        ("The actor died unexpectedly before finishing this task.", "The actor died unexpectedly"),
    ],
)
def test_one_line_names_the_cause_and_a_note_has_all_that_ray_reports(text: str, message: str, log: Path) -> None:
    error = actor_death(RayActorError(error_msg=text), "learner/0 to make version 7")
    assert "its actor died while waiting for learner/0 to make version 7: " + message in str(error)
    assert "\n" not in str(error) and str(log) not in str(error), "a log without a word is not named"
    assert error.__notes__ == [text.strip()]
    assert error.failure is not None and error.failure.fingerprint is None


def test_an_exception_of_a_constructor_is_named_with_its_frames(log: Path) -> None:
    error = actor_death(RayActorError(error_msg=IN_INIT, actor_init_failed=True), "reward/0 to start")
    assert "reward/0 to start: ValueError: no such reward at app/rewards/components.py:12 in __init__" in str(error)


def test_a_crash_is_named_with_its_signal_and_python_frames_from_the_workers_log(log: Path) -> None:
    log.write_text(SEGFAULT)
    error = actor_death(RayActorError(error_msg=HEAD + DEAD + NO_WORD), "a group")
    crash = (
        "its process 4711 crashed with SIGSEGV at torch/nn/functional.py:519 in linear, called from vllm/model.py:16"
    )
    assert crash in str(error) and str(error).endswith(f"its log is {log}")
    assert error.failure is not None and error.failure.fingerprint is not None
    assert error.__notes__[1].startswith(f"The end of {log}:\n*** SIGSEGV")
