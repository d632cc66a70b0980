"""A user's reward function: any number that it returns, the ways in which it is written, and the time of its import."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mobula.cluster.errors import PreflightError, RewardError
from mobula.cluster.records.trajectory import Response
from mobula.configs.load import load_config
from mobula.deploy.wiring.preparation import prepare
from mobula.rewards.contract import FailureKind, RewardRequest, Score, ScoringFailure, checked, evaluate, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedPool, IsolatedProcess, Tools

FUNCTIONS = """
import asyncio
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

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
    "other keys": {"reward": 1.0}, "text part": {"score": 1.0, "answer": "7"},
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
"""


@pytest.fixture(scope="module")
def users_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("users") / "own.py"
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
        (
            "of_trl",
            {},
            "takes (completions, kwargs), as functions of other trainers do: a reward function is called as",
        ),
        ("of_verl", {}, "takes (data_source, solution_str, ground_truth, extra_info), as functions of other trainers"),
        ("three", {}, "needs options.answer, which is not set; a reward function is called as function(request"),
        ("nothing", {}, "takes () and no request: a reward function is called as function(request, **options) and"),
        ("by_keyword", {}, "takes (request) and no request"),
        ("positional", {"bonus": 1}, "of which options are given by keyword"),
        ("yields", {}, "it yields values: return one number"),
        ("Rule", {}, "it is a class, not a function"),
        ("VALUES", {}, "it is a dict, not a function"),
        ("rihgt", {}, "has no rihgt (did you mean 'right'?)"),
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
    with pytest.raises(
        PreflightError, match=r"rewards\.components\[mine\]: reward function .*:nothing' takes \(\) and"
    ):
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
