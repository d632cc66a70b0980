"""Modes of files: for the owner alone, or for the group as well."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from mobula.cluster.errors import PreflightError
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import file_access, held_run_folder, make_run_folder
from mobula.deploy.report.diagnose import command
from mobula.deploy.training_service.store import Database, Session


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def config_of(folder: Path, *words: str) -> RunConfig:
    return load_config(["experiment=digits", f"folder={folder / 'runs'}", "name=a", *words])


def modes(folder: Path) -> set[str]:
    """Kind and mode of the folder and of all below it."""
    paths = (folder, *folder.rglob("*"))
    return {f"{'d' if p.is_dir() else '-'}{stat.S_IMODE(p.lstat().st_mode):o}" for p in paths if not p.is_symlink()}


def fill(folder: Path) -> None:
    """Files as a process with the usual umask makes them."""
    (folder / "checkpoints" / "step").mkdir(parents=True, exist_ok=True)
    for name in ("run.log", "checkpoints/step/model.safetensors"):
        (folder / name).write_text("x")


@pytest.mark.parametrize(("access", "expected"), [("owner", {"d700", "-600"}), ("group", {"d750", "-640"})])
def test_modes_follow_the_key(tmp_path: Path, access: str, expected: set[str]) -> None:
    config = config_of(tmp_path, f"folder_access={access}")
    fill(config.run_folder)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (config.run_folder / "link").symlink_to(outside)
    assert modes(config.run_folder) == {"d755", "-644"}
    with held_run_folder(config):
        make_run_folder(config)
        fill(config.run_folder / "more")
        assert modes(config.run_folder) == expected
    assert os.umask(0o022) == 0o022, "the caller's is restored"
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644, "links are not followed"
    closed = config_of(tmp_path, "folder_access=owner")
    with held_run_folder(closed):
        assert modes(config.run_folder) == {"d700", "-600"}


def test_a_new_run_is_closed_with_its_parents(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with held_run_folder(config):
        make_run_folder(config)
    assert modes(config.folder) == {"d700", "-600"}


async def test_servers_change_the_folders_of_earlier_parts(tmp_path: Path) -> None:
    fill(tmp_path / "service")
    config = config_of(tmp_path)
    with file_access(config, tmp_path / "service", tmp_path / "not there yet"):
        database = Database(tmp_path / "service" / "new" / "service.sqlite")
        await database.all(Session)
        await database.close()
        assert modes(tmp_path / "service") == {"d700", "-600"}


def test_a_foreign_temporary_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gettempdir", lambda: str(tmp_path))
    subject = command.subject_of(["experiment=digits", "name=a"], None)
    made = command.pictures_folder(subject)
    assert modes(made) == {"d700"}
    made.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made.symlink_to(elsewhere)
    with pytest.raises(PreflightError, match="of another user"):
        command.pictures_folder(subject)
