"""The reward worker: one answer that hangs, raises or returns NaN costs that answer, by name, and nothing else."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from ray import cloudpickle
from reward_data import answers, component, component_of, rewards_of
from waiting import wait_until

from mobula.cluster.errors import RewardError
from mobula.cluster.records.media import MediaHandle, ProcessedMedia
from mobula.cluster.records.trajectory import Answers, Reward, TrajectoryGroup
from mobula.configs.schema import RewardComponent
from mobula.rewards.components import ComponentError, RecipeBook, RewardScoring
from mobula.rewards.contract import FailureKind, Score, ScoringFailure, TimedOutError
from mobula.rewards.isolation.process import IsolatedProcess, Tools
from mobula.rewards.pool.worker import GroupOutcomes, Question, RewardWorker

PLUGIN = '''
import os, signal, time

def score(request, *, bonus):
    """Does what the text of the response asks for."""
    if request.response.text == "hang":
        time.sleep(1000)
    if request.response.text == "backtrack":
        __import__("re").fullmatch("(a+)+b", "a" * 50)
    if request.response.text == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if request.response.text == "exit":
        raise SystemExit(3)
    if request.response.text == "eat":
        return len(bytearray(8 * 2**30))
    if request.response.text == "unpicklable":
        return lambda: 0
    return float(request.response.text) + bonus

def pid(*arguments):
    return os.getpid()

def num_image_bytes(request):
    return float(sum(map(len, request.prompt_images)))
'''

SPINNER = """
import os, pathlib

def spin(note):
    pathlib.Path(note).write_text(f"{os.getpid()}\\n")
    while True:
        pass
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "reward_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "reward_plugin:score"
    sys.modules.pop("reward_plugin", None)


class Scores(NamedTuple):
    """What a run makes of one group's outcomes."""

    rewards: tuple[Reward | None, ...]
    failures: tuple[tuple[str, ComponentError], ...]  # (trajectory id, error)


class OneWorker:
    """A worker, and the rewards of what it returns."""

    def __init__(self, worker: RewardWorker, book: RecipeBook) -> None:
        self.worker = worker
        self._book = book

    def score(self, *groups: TrajectoryGroup) -> list[Scores]:
        return [self._scores(outcomes) for outcomes in self.worker.score([Question(group) for group in groups])]

    def _scores(self, answered: GroupOutcomes) -> Scores:
        rewards: list[Reward | None] = []
        failures = []
        for trajectory_id, outcomes in zip(answered.trajectory_ids, answered.outcomes, strict=True):
            try:
                rewards.append(self._book.reward(answered.label, outcomes))
            except ComponentError as error:
                rewards.append(None)
                failures.append((trajectory_id, error))
        return Scores(tuple(rewards), tuple(failures))


@pytest.fixture
def make_worker() -> Iterator[Callable[..., OneWorker]]:
    workers = []

    def make(*components: RewardComponent, function_timeout_s: float = 20, group_timeout_s: float = 120) -> OneWorker:
        config = rewards_of(*components)
        workers.append(
            RewardWorker(
                config,
                "reward",
                object_timeout_s=5,
                start_timeout_s=120,
                function_timeout_s=function_timeout_s,
                group_timeout_s=group_timeout_s,
                device="cpu",
                dtype="float32",
            )
        )
        return OneWorker(workers[-1], RecipeBook(config))

    yield make
    for worker in workers:
        worker.close()


def group(*texts: str, references: tuple[str, ...] = ("7",)) -> TrajectoryGroup:
    return answers("0/0/a", *texts, references=references)


def test_a_group_is_the_weighted_sum_of_named_components(make_worker: Callable[..., OneWorker]) -> None:
    worker = make_worker(
        component("accuracy", "math_answer", 1.0, require_boxed=True),
        component("format", "format", 0.5, preset="boxed"),
    )
    (score,) = worker.score(group(r"\boxed{7}", r"\boxed{7}!", r"\boxed{8}", "7"))
    assert [reward.value for reward in score.rewards] == [1.5, 1.0, 0.5, 0.0]
    assert score.rewards[1].components == {"accuracy": 1.0, "format": 0.0}
    assert score.rewards[3].reasons == {"accuracy": r"no \boxed{} answer", "format": r"0 \boxed{} instead of one"}
    assert score.failures == () and worker.worker.ping()
    idle = (not process.is_running for process in worker.worker._isolated._processes)
    assert all(idle), "plain answers may not pay for a process"


def test_answers_that_come_by_value_are_scored_as_their_group_is(make_worker: Callable[..., OneWorker]) -> None:
    worker = make_worker(component("accuracy", "math_answer", require_boxed=True))
    whole = group(r"\boxed{7}", "7", r"\boxed{9^{9}}")
    by_value = Answers(whole.prompt, (0, 1, 2), whole.small_responses()).lean(with_media=False)
    last = Answers(whole.prompt, (2,), whole.small_responses()[2:])
    first, second, third = worker.worker.score([Question(whole), Question(by_value), Question(last)])
    assert first == second
    assert (third.trajectory_ids, third.outcomes) == (first.trajectory_ids[2:], first.outcomes[2:])


def test_what_fails_is_named_and_the_rest_is_scored(plugin: str, make_worker: Callable[..., OneWorker]) -> None:
    worker = make_worker(component("mine", plugin, bonus=0.5), function_timeout_s=1)
    texts = ("1", "hang", "2", "nan", "word", "die", "exit", "eat", "unpicklable", "backtrack", "inf", "3")
    (score,) = worker.score(group(*texts))
    assert [r and r.value for r in score.rewards] == [1.5, None, 2.5, *[None] * 8, 3.5]
    kinds = {texts[int(name.partition("#")[2])]: error.kind for name, error in score.failures}
    assert kinds == {
        "hang": FailureKind.TIMED_OUT,
        "backtrack": FailureKind.TIMED_OUT,
        "nan": FailureKind.NOT_FINITE,
        "inf": FailureKind.NOT_FINITE,
        "word": FailureKind.FAILED,
        "die": FailureKind.FAILED,
        "exit": FailureKind.FAILED,
        "eat": FailureKind.FAILED,
        "unpicklable": FailureKind.FAILED,
    }
    assert {error.component for _, error in score.failures} == {"mine"}
    assert "ValueError" in next(error.reason for name, error in score.failures if name.endswith("#4"))


def test_an_answer_too_large_to_evaluate_is_wrong_at_once(make_worker: Callable[..., OneWorker]) -> None:
    worker = make_worker(component("accuracy", "math_answer", require_boxed=True), function_timeout_s=3)
    (score,) = worker.score(group(r"\boxed{\sqrt{49}}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{7}", r"\boxed{\sqrt{49}}"))
    assert [r and r.value for r in score.rewards] == [1.0, 0.0, 1.0, 1.0] and score.failures == ()


def test_a_group_ends_in_its_time_however_many_hang(make_worker: Callable[..., OneWorker]) -> None:
    worker = make_worker(component("shape", "format", pattern="(a+)+"), function_timeout_s=60, group_timeout_s=3)
    hanging = "a" * 50 + "b"
    started = time.monotonic()
    (score,) = worker.score(group("a", *[hanging] * 50))
    assert time.monotonic() - started < 6
    assert score.rewards == (Reward(1.0, {"shape": 1.0}), *[None] * 50)
    assert [error.kind for _, error in score.failures] == [FailureKind.TIMED_OUT] * 50
    (score,) = worker.score(group("a"))
    assert score.rewards[0].value == 1.0, "the next group has its own time"


def test_a_group_that_cannot_be_scored_by_one_component_has_no_reward(
    plugin: str, make_worker: Callable[..., OneWorker]
) -> None:
    worker = make_worker(component("format", "format", preset="boxed"), component("mine", plugin, bonus=0))
    (score,) = worker.score(group(r"\boxed{7}"))
    assert score.rewards == (None,)
    assert re.match("reward component 'mine' failed: .*ValueError", str(score.failures[0][1]))


def test_groups_of_one_call_get_each_their_own(make_worker: Callable[..., OneWorker]) -> None:
    worker = make_worker(component("accuracy", "math_answer", require_boxed=True))
    first, second = worker.score(group(r"\boxed{7}", r"\boxed{8}"), group(r"\boxed{9}", references=("9",)))
    assert [r and r.value for r in first.rewards] == [1.0, 0.0]
    assert [r and r.value for r in second.rewards] == [1.0]


def test_images_come_to_the_components_that_look_at_them(make_worker: Callable[..., OneWorker], plugin: str) -> None:
    media = ProcessedMedia("image", {}, files=(b"12345",))
    handle = MediaHandle("key", "image", media.num_bytes, media)
    asked = group("0")
    asked = replace(asked, prompt=replace(asked.prompt, media=(handle,)))
    name = plugin.replace(":score", ":num_image_bytes")
    for needs_images, expected in ((True, 5.0), (False, 0.0)):
        worker = make_worker(component_of("seen", name, needs_images=needs_images))
        (score,) = worker.score(asked)
        assert [r and r.value for r in score.rewards] == [expected]


def unused_tools() -> Tools:
    return Tools(IsolatedProcess(timeout_s=1, start_timeout_s=1), "cpu", "float32")


def test_unfit_functions_are_refused_when_the_worker_is_built() -> None:
    with pytest.raises(ValueError, match=r"components\[a\]: .*did you mean 'format'"):
        RewardScoring(rewards_of(component("a", "formatt", preset="boxed")), None, unused_tools())


def test_a_users_options_are_checked_before_the_first_response(plugin: str) -> None:
    tools = Tools(IsolatedProcess(timeout_s=20, start_timeout_s=60), "cpu", "float32")
    with pytest.raises(ValueError, match="did you mean 'bonus'"):
        RewardScoring(rewards_of(component("mine", plugin, bonsu=1)), None, tools)
    with pytest.raises(ValueError, match="needs options.bonus"):
        RewardScoring(rewards_of(component("mine", plugin)), None, tools)
    tools.isolated.close()


def test_the_isolated_process_starts_late_survives_errors_and_leaves_no_zombie(plugin: str) -> None:
    isolated = IsolatedProcess(timeout_s=1, start_timeout_s=60)
    isolated.close()
    first = isolated.call("reward_plugin:pid")
    with pytest.raises(RewardError, match="TypeError"):
        isolated.call("math:factorial", "seven")
    assert isolated.call("reward_plugin:pid") == first != os.getpid()
    with pytest.raises(TimedOutError, match=r"waited 1 s for time:sleep"):
        isolated.call("time:sleep", 1000)
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    second = isolated.call("reward_plugin:pid")
    assert second != first
    os.kill(second, signal.SIGKILL)
    with pytest.raises(RewardError, match="died with exit code -9"):
        isolated.call("reward_plugin:pid")
    assert isolated.call("math:factorial", 5) == 120
    isolated.close()


def test_a_hanging_process_ends_after_its_parent_was_killed(tmp_path: Path) -> None:
    (tmp_path / "spinner.py").write_text(SPINNER)
    script = (
        "import sys; from mobula.rewards.isolation.process import IsolatedProcess; "
        "IsolatedProcess(timeout_s=1, start_timeout_s=60).call('spinner:spin', sys.argv[1])"
    )
    note = tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    parent = subprocess.Popen([sys.executable, "-c", script, str(note)], env=environment)
    wait_until(lambda: note.exists() and note.read_text().endswith("\n"))
    parent.kill()
    parent.wait()
    child = Path("/proc") / note.read_text().strip()
    wait_until(lambda: not child.exists() or is_zombie(child))  # a container's init may not collect it


def is_zombie(process: Path) -> bool:
    return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_ten_megabytes_travel_to_the_isolated_process() -> None:
    isolated = IsolatedProcess(timeout_s=20, start_timeout_s=60)
    assert isolated.call("mobula.rewards.functions.response_form:full_match", "a*", "a" * 10_000_000) is True
    isolated.close()


def test_outcomes_of_a_worker_arrive_unchanged() -> None:
    answered = GroupOutcomes(
        label="digits",
        trajectory_ids=("0/0/s#0", "0/0/s#1", "0/0/s#2"),
        outcomes=(
            {"accuracy": Score(1.0, "right", {"digits": 1.0}), "format": Score(0.5)},
            None,
            {
                "accuracy": ScoringFailure(FailureKind.TIMED_OUT, "2 s"),
                "format": Score(0.0, breakdown=MappingProxyType({"a": 2.0})),
            },
        ),
        num_retried=3,
    )
    assert {field.name for field in fields(answered)} == {"label", "trajectory_ids", "outcomes", "num_retried"}
    for travels in (pickle, cloudpickle):
        assert travels.loads(travels.dumps(answered)) == answered


def test_a_worker_of_rules_loads_no_torch() -> None:
    """Half a gigabyte of host memory a process, and seconds of its start."""
    modules = "rewards.pool.worker, cluster.runtime.ray_actors, cluster.records.arrow"
    check = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
