"""`mobula replay` around its parts: scoring again, comparing weights, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import make_group, make_prompt
from safetensors.torch import save_file

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.tools import replay as command
from mobula.deploy.wiring.persistence import trajectory_log

OPTIONS = "{ignore_case: false, whole_response: true}"
REST = "service: reward, needs_images: false, retries: 0, cache_entries: 0"
CONFIG = load_config(
    ["experiment=digits"]
    + [f"rewards.components=[{{name: accuracy, function: exact_match, weight: 2.0, options: {OPTIONS}, {REST}}}]"]
)


def record(folder: Path, *rewards: Reward | None) -> None:
    """One step of one group; the second answer is the right one."""
    group = make_group(replace(make_prompt("0/0/s0"), references=("answer of 0/0/s0#1",)))
    trajectory_log(folder, CONFIG).append(1, [ScoredGroup(group.summary(), group, rewards)])


def test_recorded_responses_are_scored_with_the_functions_of_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, Reward(1.0, {"accuracy": 1.0}), Reward(2.0, {"accuracy": 1.0}))
    assert command.score(tmp_path, CONFIG) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.replace("│", " ").split() for line in lines if line.startswith("│")]
    assert rows == [["accuracy", "2", "1.0000", "0.5000", "1", "1"], ["reward", "2", "1.5000", "1.0000", "1", "1"]]
    assert "2 responses of 1 steps; could not be scored: 0 then, 0 now" in lines[-1]


def test_what_only_one_side_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, Reward(1.0, {"length": 1.0}), None)
    command.score(tmp_path, CONFIG)
    assert "only one side has them: accuracy, length" in capsys.readouterr().out


def test_a_reward_that_does_not_exist_is_the_users_mistake(tmp_path: Path) -> None:
    record(tmp_path, Reward(1.0, {}), None)
    with pytest.raises(PreflightError, match=r"rewards\.components\[accuracy\]: exact_match has no option"):
        command.score(tmp_path, load_config(["experiment=digits", "rewards.components.0.function=exact_match"]))


def test_a_run_without_a_log_or_without_its_version_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"replay\.trajectory_log=true"):
        command.replay(tmp_path, CONFIG)
    record(tmp_path, Reward(1.0, {}), None)
    with pytest.raises(PreflightError, match=r"step-000000 is missing"):
        command.replay(tmp_path, CONFIG)


@pytest.mark.parametrize("ask", [command.replay, command.score])
def test_a_damaged_log_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Path, RunConfig], int]
) -> None:
    record(tmp_path, Reward(1.0, {}), None)
    [path] = trajectory_log(tmp_path, CONFIG).folder.glob("*.parquet")
    path.write_bytes(b"PAR1")
    monkeypatch.setattr(command, "IsolatedPool", None)
    with pytest.raises(PreflightError, match=r"step-000001\.parquet is no record of a step"):
        ask(tmp_path, CONFIG)


def test_weights_are_compared_over_all_files_of_a_checkpoint(tmp_path: Path) -> None:
    def write(name: str, **tensors: torch.Tensor) -> Path:
        (tmp_path / name).mkdir()
        for key, tensor in tensors.items():
            save_file({key: tensor}, tmp_path / name / f"{key}.safetensors")
        return tmp_path / name

    one = write("one", a=torch.ones(2), b=torch.ones(3))
    assert command.largest_difference(one, write("same", a=torch.ones(2), b=torch.ones(3))) == 0
    assert command.largest_difference(one, write("other", a=torch.ones(2), b=torch.full((3,), 1.5))) == 0.5
    assert command.largest_difference(one, write("fewer", a=torch.ones(2))) == float("inf")
