"""A TMPDIR that Ray cannot use costs a warning, not the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mobula.cluster.errors import PreflightError
from mobula.deploy.host.temporary import ray_folder


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("x" * 40, "is longer than the 35 bytes"),
        ("a b", "has letters"),
        ("gr\u00fcn", "has letters"),
        ("absent", "is no folder"),
    ],
)
def test_a_folder_that_ray_cannot_use_is_named_with_its_variable(
    name: str, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # names that are short enough
    if name != "absent":
        Path(name).mkdir()
    with pytest.raises(PreflightError, match=f"TMPDIR={name} {fault}.*set RAY_TMPDIR"):
        ray_folder({"TMPDIR": name}, fallback=Path("nowhere"))
    Path("t").mkdir()
    assert ray_folder({"TMPDIR": name}, fallback=Path("t")) == Path("t/ray")
    assert f"TMPDIR={name} {fault}" in caplog.text


def test_a_short_folder_is_left_to_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").mkdir()
    assert ray_folder({}) is None and ray_folder({"TMPDIR": "t"}) is None
    assert ray_folder({"RAY_TMPDIR": "t", "TMPDIR": "x" * 80}) is None, "Ray reads RAY_TMPDIR first"


def test_a_full_disk_is_named_before_ray_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("t").mkdir()
    free = {"full": 1 << 20, "t": 1 << 30}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    assert ray_folder({"TMPDIR": "full"}, fallback=Path("t")) == Path("t/ray")
    assert ray_folder({"TMPDIR": "t"}, fallback=Path("full")) is None
    for environment in ({}, {"TMPDIR": "full"}):
        with pytest.raises(
            PreflightError, match="full is on a disk with 1 MiB free, .*free the disk, or set RAY_TMPDIR"
        ):
            ray_folder(environment, fallback=Path("full"))
