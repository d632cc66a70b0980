"""Reward functions in Python environments of other packages: installed once, supervised, and refused if unfit."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from reward_data import component_of, request, rewards_of

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.trajectory import EpisodeTurn, Response
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.deploy.preflight.user_code import check_user_code
from mobula.rewards.components import RewardScoring
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure
from mobula.rewards.tools import Tools

OTHER = "0.0.1"  # a version of numpy that Mobula does not run with
FUNCTIONS = """
import time
import numpy

def length(request, *, bonus=0):
    assert numpy.__version__ == "0.0.1", numpy.__version__
    known = len(request.references[0]) + request.metadata["level"]
    return {"score": len(request.response.text) + known + bonus, "reason": numpy.__version__}

def batch(requests):
    files = {image for request in requests for image in request.prompt_images}
    return [len(requests) + 0.1 * len(files) + 0.01 * len(each.response.turns) for each in requests]

def one_number(requests):
    return 1.0

class Score:
    pass

async def slow(request):
    if request.response.text == "hang":
        time.sleep(60)
    if request.response.text == "raise":
        raise KeyError("nothing")
    if request.response.text == "exit":
        import os
        os._exit(3)
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With `requirements.txt` and a wheel of a numpy that no index has."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / f"numpy-{OTHER}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("numpy/__init__.py", f"__version__ = {OTHER!r}\n")
        info = f"numpy-{OTHER}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: numpy\nVersion: {OTHER}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        names = ("numpy/__init__.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD")
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))
    (tmp_path / "requirements.txt").write_text(f"--no-index\n--find-links {wheels}\nnumpy=={OTHER}\n")
    (tmp_path / "reward.py").write_text(FUNCTIONS)
    return tmp_path


@pytest.fixture
def tools() -> Iterator[Tools]:
    made = Tools.timed(1, 2.0, 120.0, "cpu", "float32")
    yield made
    made.close()


def outcomes(folder: Path, tools: Tools, name: str, requests: Sequence[RewardRequest], **given: str) -> list[Outcome]:
    given = given or {"requirements": str(folder / "requirements.txt")}
    options = {"bonus": 3} if name == "length" else {}
    own = component_of("own", f"{folder}/reward.py:{name}", options=options, **given)
    scoring = RewardScoring(rewards_of(own, environments_path=folder / "environments"), None, tools)
    return [found["own"] for found in scoring.outcomes(requests)]


def test_a_function_has_the_packages_of_its_file_and_they_are_installed_once(folder: Path, tools: Tools) -> None:
    asked = [request("four", "12", level=1), request("", "1", level=0)]
    assert outcomes(folder, tools, "length", asked) == [Score(10, OTHER), Score(4, OTHER)]
    assert np.__version__ != OTHER
    environment = next(path for path in (folder / "environments").iterdir() if path.is_dir())
    before = environment.stat().st_mtime_ns
    again = Tools.timed(1, 2.0, 120.0, "cpu", "float32")
    try:
        assert outcomes(folder, again, "length", asked[:1]) == [Score(10, OTHER)]
    finally:
        again.close()
    assert environment.stat().st_mtime_ns == before


def test_packages_on_the_path_of_mobula_are_not_those_of_the_function(
    folder: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder / "site-packages"
    (other / "numpy").mkdir(parents=True)
    (other / "numpy" / "__init__.py").write_text("__version__ = '9'")
    monkeypatch.setenv("PYTHONPATH", str(other))
    assert outcomes(folder, tools, "length", [request("four", "12", level=1)]) == [Score(10, OTHER)]


def test_a_batch_is_one_call_with_images_and_turns(folder: Path, tools: Tools) -> None:
    turn = EpisodeTurn(0, 1, "left", "a wall", {"step": 0.5}, "none")
    asked = [
        RewardRequest(Response("a", 1, is_truncated=False, turns=(turn,) * num), (), {}, "?", (b"one", b"two"))
        for num in (0, 2)
    ]
    found = outcomes(folder, tools, "batch", asked)
    assert [each.value for each in found if isinstance(each, Score)] == pytest.approx([2.2, 2.22])
    failing = RewardRequest(Response("a", 1, is_truncated=False, failure="timed_out: a tool"), (), {}, "?")
    for pair in ([failing], [failing, asked[0]]):  # the function is not called without a response
        first, *others = outcomes(folder, tools, "batch", pair)
        assert first == ScoringFailure(FailureKind.FAILED, "the episode failed: timed_out: a tool")
        assert [each.value for each in others if isinstance(each, Score)] == pytest.approx([1.2] * len(others))
    (failed,) = outcomes(folder, tools, "one_number", asked[:1])
    assert isinstance(failed, ScoringFailure) and "returned float: return a list" in failed.reason


def test_a_function_that_hangs_raises_or_dies_costs_its_own_response(folder: Path, tools: Tools) -> None:
    found = outcomes(folder, tools, "slow", [request(text) for text in ("a", "hang", "raise", "exit", "b")])
    first, hung, raised, died, last = found
    assert first == last == Score(1.0)
    assert isinstance(hung, ScoringFailure) and hung.kind is FailureKind.TIMED_OUT
    assert isinstance(raised, ScoringFailure) and "KeyError: 'nothing'" in raised.reason
    assert isinstance(died, ScoringFailure) and "exit code 3" in died.reason


def test_a_python_of_the_users_runs_it(folder: Path, tools: Tools) -> None:
    assert outcomes(folder, tools, "slow", [request("a")], python=sys.executable) == [Score(1.0)]


def config_words(folder: Path, **given: str) -> list[str]:
    words = ["experiment=digits", "rewards=own", f"rewards.components.0.function={folder}/reward.py:slow"]
    words += [f"rewards.environments_path={folder}/environments"]
    return words + [f"rewards.components.0.{key}={value}" for key, value in given.items()]


def test_packages_that_cannot_be_installed_are_refused_before_a_role_starts(folder: Path) -> None:
    wanted = folder / "other.txt"
    wanted.write_text(f"--no-index\n--find-links {folder}/wheels\nnumpy==7\n")
    with pytest.raises(PreflightError, match=r"(?s)rewards.components\[.*other.txt cannot be installed.*numpy==7"):
        check_user_code(load_config(config_words(folder, requirements=str(wanted))))
    assert not [path for path in (folder / "environments").iterdir() if path.is_dir()], "nothing is left behind"
    with pytest.raises(PreflightError, match=r"requirements: no file .*none.txt here"):
        check_user_code(load_config(config_words(folder, requirements=str(folder / "none.txt"))))
    words = [word.replace(":slow", ":Score") for word in config_words(folder, python=sys.executable)]
    with pytest.raises(PreflightError, match=r"it is a class, not a function"):
        check_user_code(load_config(words))
    with pytest.raises(PreflightError, match=r"python=no/python cannot be run"):
        check_user_code(load_config(config_words(folder, python="no/python")))


def test_contradictions_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has requirements and python: give one of them"):
        load_config(config_words(folder, requirements="a.txt", python="b"))
    words = ["experiment=digits", "rewards=exact_match", "rewards.components.0.requirements=a.txt"]
    with pytest.raises(ConfigError, match=r"built in and has the packages of Mobula"):
        load_config(words)
