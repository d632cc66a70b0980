"""What Ray reports of an actor that ended becomes one line that names the cause."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.failures import MAX_LINE
from mobula.cluster.runtime import ray_actors
from mobula.cluster.runtime.ray_actors import MEMORY_SETTINGS, OTHER_SETTINGS, actor_death, answer
from mobula.configs.overrides import find

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
FIRST, SECOND = "e00859d7d2e57ffde2c0d97b01000000", "37286bebc65c9c98fe43262401000000"
OUT_OF_MEMORY = f"""2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, \
ID: 85d6) was 23.10GB used / 23.54GB limit (0.981308)
OOM kill reason: Memory usage 24803431219B exceeded threshold of 24012260860B (95.0% of 25276063744B limit)
Ray killed 2 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Actor({FIRST}): job ID=01, lease ID=02, task name=LearnerRank.__init__, required resources={{}}, \
pid=11633, actual memory used=5.56GB, worker ID=4a22)
Selected to kill: (Actor({SECOND}): job ID=01, lease ID=03, task name=RolloutActor.__init__, required resources={{}}, \
pid=11564, actual memory used=4.97GB, worker ID=7b5b)
]
Refer to the documentation on how to address the out of memory issue"""  # Ray 2.60


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where process 4711 wrote its stderr, on a node that it shares with this process."""
    path = tmp_path / "worker-4711.err"
    path.write_text(":job_id:01000000\n")
    monkeypatch.setattr(ray_actors, "_path_of", lambda process_id: path if process_id == "4711" else None)
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


@pytest.mark.parametrize(
    ("what", "actor", "process", "settings"),
    [
        ("learner/0 to send weights", FIRST, "its process 11633, which used 5.56 GB,", MEMORY_SETTINGS["learner"]),
        ("rollout/1 to join a transfer", SECOND, "its process 11564, which used 4.97 GB,", MEMORY_SETTINGS["rollout"]),
        ("step of an environment", "of another node", "its process", OTHER_SETTINGS),
    ],
)
def test_an_end_by_rays_memory_monitor_names_memory_and_settings(
    what: str, actor: str, process: str, settings: tuple[str, str, str]
) -> None:
    error = actor_death(OutOfMemoryError(OUT_OF_MEMORY), what, actor)
    assert str(error) == (
        f"its actor died while waiting for {what}: Ray ended {process} because its node is out of memory: 23.10 of "
        f"23.54 GB are used; change {settings[0]}, {settings[1]} or {settings[2]}, or use a node with more memory"
    )
    assert len(str(error)) < MAX_LINE, "tables show it whole"
    assert error.failure is not None and error.failure.fingerprint is None, "it was ended from outside"
    assert error.__notes__ == [OUT_OF_MEMORY]


def test_settings_that_reduce_memory_are_keys_of_the_schema() -> None:
    for setting in {*OTHER_SETTINGS, *(setting for settings in MEMORY_SETTINGS.values() for setting in settings)}:
        assert find(setting.partition("=")[0]) is not None, setting


class FailedCall:
    """A reference to the result of a call on the actor FIRST, as far as `answer` uses it."""

    def __init__(self, error: Exception) -> None:
        self._future: Future[None] = Future()
        self._future.set_exception(error)

    def future(self) -> Future[None]:
        return self._future

    def task_id(self) -> ray.TaskID:
        return ray.TaskID.for_actor_creation_task(ray.ActorID(bytes.fromhex(FIRST)))


@pytest.mark.parametrize(
    "error", [OutOfMemoryError(OUT_OF_MEMORY), RayActorError(), NodeDiedError("gone"), WorkerCrashedError()]
)
async def test_every_way_in_which_ray_reports_the_end_of_a_process_is_a_lost_worker(error: RayError) -> None:
    with pytest.raises(WorkerDiedError, match="its actor died while waiting for learner/0 to send weights") as raised:
        await answer(FailedCall(error), timeout_s=1, what="learner/0 to send weights")
    assert ("used 5.56 GB" in str(raised.value)) == isinstance(error, OutOfMemoryError)
