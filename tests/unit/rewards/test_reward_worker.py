"""The reward worker and functions of a user: any number that they return; hangs, errors and NaN cost one answer."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle
from reward_data import answers, component, component_of, rewards_of, worker_of
from waiting import wait_until

from mobula.cluster.errors import PreflightError, RewardError
from mobula.cluster.records.media import MediaHandle, ProcessedMedia
from mobula.cluster.records.trajectory import Answers, Response, Reward, TrajectoryGroup
from mobula.configs.load import load_config
from mobula.configs.schema import RewardComponent
from mobula.deploy.wiring.preparation import prepare
from mobula.rewards.components import ComponentError, RecipeBook
from mobula.rewards.contract import (
    FailureKind,
    Outcome,
    RewardRequest,
    Score,
    ScoringFailure,
    TimedOutError,
    checked,
    evaluate,
    evaluate_batch,
)
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedPool, IsolatedProcess
from mobula.rewards.pool.worker import GroupOutcomes, Question, RewardWorker
from mobula.rewards.tools import Tools

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


class OneWorker:
    """A worker, and what a run makes of its outcomes."""

    def __init__(self, worker: RewardWorker, book: RecipeBook) -> None:
        self.worker = worker
        self._book = book

    def score(self, group: TrajectoryGroup) -> list[Reward | ComponentError]:
        [answered] = self.worker.score([Question(group)])
        return [self._reward(answered.label, outcomes) for outcomes in answered.outcomes]

    def _reward(self, label: str, outcomes: Mapping[str, Outcome]) -> Reward | ComponentError:
        try:
            return self._book.reward(label, outcomes)
        except ComponentError as error:
            return error


@pytest.fixture
def make_worker() -> Iterator[Callable[..., OneWorker]]:
    workers: list[RewardWorker] = []

    def make(*components: RewardComponent, **timeouts: float) -> OneWorker:
        config = rewards_of(*components)
        workers.append(worker_of(config, **timeouts))
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
    rewards = worker.score(group(r"\boxed{7}", r"\boxed{7}!", r"\boxed{8}", "7"))
    assert [reward.value for reward in rewards] == [1.5, 1.0, 0.5, 0.0]
    assert rewards[1].components == {"accuracy": 1.0, "format": 0.0}
    assert rewards[3].reasons == {"accuracy": r"no \boxed{} answer", "format": r"0 \boxed{} instead of one"}
    assert worker.worker.ping()
    idle = (not process.is_running for process in worker.worker._tools.isolated._processes)
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
    found = dict(zip(texts, worker.score(group(*texts)), strict=True))
    scored = {text: reward.value for text, reward in found.items() if isinstance(reward, Reward)}
    assert scored == {"1": 1.5, "2": 2.5, "3": 3.5}
    failed = {text: error for text, error in found.items() if isinstance(error, ComponentError)}
    assert {text: error.kind for text, error in failed.items()} == {
        **dict.fromkeys(("hang", "backtrack"), FailureKind.TIMED_OUT),
        **dict.fromkeys(("nan", "inf"), FailureKind.NOT_FINITE),
        **dict.fromkeys(("word", "die", "exit", "eat", "unpicklable"), FailureKind.FAILED),
    }
    assert {error.component for error in failed.values()} == {"mine"}
    assert "ValueError" in failed["word"].reason


def test_a_group_ends_in_its_time_however_many_hang(make_worker: Callable[..., OneWorker]) -> None:
    worker = make_worker(component("shape", "format", pattern="(a+)+"), function_timeout_s=60, group_timeout_s=3)
    hanging = "a" * 50 + "b"
    started = time.monotonic()
    first, *late = worker.score(group("a", *[hanging] * 50))
    assert time.monotonic() - started < 6
    assert first == Reward(1.0, {"shape": 1.0}) and [error.kind for error in late] == [FailureKind.TIMED_OUT] * 50
    assert worker.score(group("a")) == [first], "the next group has its own time"


def test_images_come_to_the_components_that_look_at_them(make_worker: Callable[..., OneWorker], plugin: str) -> None:
    media = ProcessedMedia("image", {}, files=(b"12345",))
    handle = MediaHandle("key", "image", media.num_bytes, media)
    asked = group("0")
    asked = replace(asked, prompt=replace(asked.prompt, media=(handle,)))
    name = plugin.replace(":score", ":num_image_bytes")
    for needs_images, expected in ((True, 5.0), (False, 0.0)):
        worker = make_worker(component_of("seen", name, needs_images=needs_images))
        assert [reward.value for reward in worker.score(asked)] == [expected]


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


FUNCTIONS = """
import asyncio
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

@dataclass
class Own:
    value: float

async def awaited(request):
    await asyncio.sleep(0)
    return torch.tensor(-1.0)

async def once(request, *, lock=asyncio.Lock()):
    async with lock:  # belongs to the loop of the first call
        return 1

VALUES = {
    "numpy": np.float32(2.5), "array": np.array(3), "one": np.array([4.0]), "bool": np.bool_(True),
    "torch": torch.tensor([7.0], dtype=torch.bfloat16), "grad": torch.tensor(0.5, requires_grad=True),
    "fraction": Fraction(1, 4), "decimal": Decimal("10.5"), "true": True,
    "mapping": {"score": np.float64(9.0), "reason": "all of it", "length": torch.tensor(2)},
    "several": torch.ones(3), "none": None, "nan": np.float32("nan"), "inf": torch.tensor(float("-inf")), "text": "1",
    "own": Own(1.0), "other keys": {"reward": 1.0}, "text part": {"score": 1.0, "answer": "7"},
}

def value(request):
    return VALUES[request.response.text]

def of_trl(completions, **kwargs):
    return [1.0 for _ in completions]

def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def three(prompt, answer, gold):
    return 1.0

def nothing():
    return 1.0

def by_keyword(*, request):
    return 1.0

def positional(request, bonus, /):
    return 1.0

def yields(request):
    yield 1.0

class Rule:
    def __init__(self, request):
        pass

def right(request, *, bonus=0, **others):
    return bonus

def strict(request, *, bonus):
    return bonus
"""


@pytest.fixture(scope="module")
def users_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("users") / "my rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    pool = IsolatedPool(num_processes=1, timeout_s=20, start_timeout_s=120)
    yield Tools(pool, "cpu", "float32")
    pool.close()


def request(text: str) -> RewardRequest:
    return RewardRequest(Response(text, 1, False), ("7",), {}, "Which digit?")


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (np.float16(-1.5), -1.5),
        (np.int64(10), 10.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (torch.tensor(3), 3.0),
        (torch.tensor([[2.0]]), 2.0),
        (Fraction(-1, 8), -0.125),
        (Decimal("7.5"), 7.5),
        (True, 1.0),
        (-3, -3.0),
    ],
)
def test_any_type_of_number_is_a_score(result: Any, value: float) -> None:
    assert checked(result) == Score(value)
    assert checked(Score(result, "why", {"part": result})) == Score(value, "why", {"part": value})
    assert checked({"score": result, "reason": "why", "part": result}) == Score(value, "why", {"part": value})


def test_numbers_of_a_users_function_travel_as_plain_numbers(users_file: Path, tools: Tools) -> None:
    function = build_function(f"{users_file}:value", {}, tools)
    names = ["numpy", "array", "one", "bool", "torch", "grad", "fraction", "decimal", "true"]
    outcomes = evaluate_batch(function, [request(name) for name in names])
    assert outcomes == tuple(Score(value) for value in (2.5, 3.0, 4.0, 1.0, 7.0, 0.5, 0.25, 10.5, 1.0))
    assert evaluate(function, request("mapping")) == Score(9.0, "all of it", {"length": 2.0})


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("several", FailureKind.FAILED, "returned Tensor of shape (3,), not one number"),
        ("none", FailureKind.FAILED, "returned None, as a function without `return` does: return a finite number"),
        ("nan", FailureKind.NOT_FINITE, "returned nan: return a finite number"),
        ("inf", FailureKind.NOT_FINITE, "returned -inf: return a finite number"),
        ("text", FailureKind.FAILED, "returned str: return a finite number, a mapping with 'score', or a Score"),
        ("other keys", FailureKind.FAILED, "returned a mapping with 'reward': return a finite number"),
        ("text part", FailureKind.FAILED, "returned str as 'answer': return a finite number"),
        ("own", FailureKind.FAILED, "cannot be sent or read"),  # its class is known in the isolated process alone
    ],
)
def test_a_result_that_is_no_number_is_refused_with_its_type(
    name: str, kind: FailureKind, reason: str, users_file: Path, tools: Tools
) -> None:
    [failure] = evaluate_batch(build_function(f"{users_file}:value", {}, tools), [request(name)])
    assert isinstance(failure, ScoringFailure) and failure.kind is kind
    assert reason in failure.reason


def test_coroutines_are_awaited_in_one_event_loop(users_file: Path, tools: Tools) -> None:
    assert evaluate(build_function(f"{users_file}:awaited", {}, tools), request("")) == Score(-1.0)
    once = build_function(f"{users_file}:once", {}, tools)
    assert evaluate_batch(once, [request("1"), request("2")]) == (Score(1.0), Score(1.0))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("of_trl", {}, "takes (completions, kwargs), as functions of other trainers do: a reward function is called"),
        ("of_verl", {}, "takes (data_source, solution_str, ground_truth, extra_info), as functions of other trainers"),
        ("three", {}, "needs options.answer, which is not set; a reward function is called as function(request"),
        ("nothing", {}, "takes () and no request: a reward function is called as function(request, **options) and"),
        ("by_keyword", {}, "takes (request) and no request"),
        ("positional", {"bonus": 1}, "of which options are given by keyword"),
        ("yields", {}, "it yields values: return one number"),
        ("Rule", {}, "it is a class, not a function"),
        ("VALUES", {}, "it is a dict, not a function"),
        ("rihgt", {}, "has no rihgt (did you mean 'right'?)"),
        ("strict", {"bonsu": 1}, "did you mean 'bonus'"),
    ],
)
def test_a_function_that_takes_no_request_is_refused_before_a_role_starts(
    name: str, options: dict[str, Any], message: str, users_file: Path, tools: Tools
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build_function(f"{users_file}:{name}", options, tools)


def test_a_run_checks_users_functions_before_it_looks_at_the_model(users_file: Path, tmp_path: Path) -> None:
    component = f"{{name: mine, function: {users_file}:nothing, weight: 1.0, options: {{}}, service: reward, "
    component += "needs_images: false, retries: 0, cache_entries: 0}"
    own = ["experiment=own", f"policy.model={tmp_path / 'no-model'}", f"data.path={tmp_path}", f"folder={tmp_path}"]
    config = load_config([*own, f"rewards.components=[{component}]", "rewards.accuracy_component=mine"])
    named = r"rewards\.components\[mine\]: reward function .*:nothing' takes \(\) and"
    with pytest.raises(PreflightError, match=named):
        prepare(config, lambda media: media)


def test_an_import_has_its_own_timeout_and_outlives_the_deadline_of_a_call(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(3)\ndef score(request):\n    return 7\n")
    target = f"{tmp_path / 'slow.py'}:score"
    process = IsolatedProcess(timeout_s=0.5, start_timeout_s=60)
    process.load(target, request(""))
    assert process.call(target, request("")) == 7
    process.close()
    process.deadline = time.monotonic() + 0.5
    with pytest.raises(RewardError, match="slow.py:score, which is still being imported"):
        process.call(target, request(""))
    process.deadline = float("inf")
    assert process.call("math:factorial", 5) == 120, "behind the import"
    assert process.call(target, request("")) == 7
    process.close()


def test_an_import_that_takes_too_long_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time; time.sleep(1000)\n")
    process = IsolatedProcess(timeout_s=0.5, start_timeout_s=2)
    with pytest.raises(ValueError, match=r"hangs.py:score to be imported\): raise timeouts.start_s"):
        build_function(f"{tmp_path / 'hangs.py'}:score", {}, Tools(process, "cpu", "float32"))
    process.close()
