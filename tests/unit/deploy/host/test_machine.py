"""What this machine has, as a run counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.host import machine


@pytest.mark.parametrize(("visible", "num"), [(None, 4), ("2,3", 2), ("GPU-1a2b", 1), ("", 0), ("-1", 0)])
def test_gpus_are_those_that_the_command_may_see(
    visible: str | None, num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(4):
        (tmp_path / f"0000:0{index}:00.0").mkdir()
    monkeypatch.setattr(machine, "GPU_FOLDER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.this_machine().num_gpus == num
