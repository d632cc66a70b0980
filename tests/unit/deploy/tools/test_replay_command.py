"""`mobula replay` around its parts: comparing weights, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import make_group, make_prompt
from safetensors.torch import save_file

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.configs.load import load_config
from mobula.deploy.tools import replay as command
from mobula.deploy.wiring.persistence import trajectory_log

CONFIG = load_config(["experiment=digits"])


def record(folder: Path, *rewards: Reward | None) -> None:
    """One step of one group; the second answer is the right one."""
    group = make_group(replace(make_prompt("0/0/s0"), references=("answer of 0/0/s0#1",)))
    trajectory_log(folder, CONFIG).append(1, [ScoredGroup(group.summary(), group, rewards)])


def test_a_run_without_a_log_or_without_its_version_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"replay\.trajectory_log=true"):
        command.replay(tmp_path, CONFIG)
    record(tmp_path, Reward(1.0, {}), None)
    with pytest.raises(PreflightError, match=r"step-000000 is missing"):
        command.replay(tmp_path, CONFIG)


def test_a_damaged_log_is_refused_before_anything_starts(tmp_path: Path) -> None:
    record(tmp_path, Reward(1.0, {}), None)
    [path] = trajectory_log(tmp_path, CONFIG).folder.glob("*.parquet")
    path.write_bytes(b"PAR1")
    with pytest.raises(PreflightError, match=r"step-000001\.parquet is no record of a step"):
        command.replay(tmp_path, CONFIG)


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
