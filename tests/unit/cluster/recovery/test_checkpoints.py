"""Run checkpoints: complete or absent, wherever a save is killed, and refused where they are of another run."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLearner
from waiting import until

from mobula.cluster.errors import CheckpointError, PreflightError
from mobula.cluster.recovery.checkpoints import (
    Checkpoints,
    CheckpointSchedule,
    _write_manifest,
    latest_complete,
    newest_learner_state,
    refuse_other_run,
)
from mobula.configs.schema.run import Resume


class Counting:
    """A part of the driver with a number to keep."""

    def __init__(self) -> None:
        self.value = 0

    def state(self) -> dict[str, Any]:
        return {"value": self.value}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Setup:
    """One process's view of a run folder."""

    def __init__(
        self, folder: Path, *, resume: Resume = Resume.AUTO, keep: int = 2, reached: int = 0, **identity: Any
    ) -> None:
        """`reached` is the version to which a journal leads."""
        self.folder = folder / "checkpoints"
        self.learner = FakeLearner()
        self.part = Counting()
        self.num_prepared = 0
        self.num_finished = 0
        self.checkpoints = Checkpoints(
            self.folder,
            learner=self.learner,
            parts={"part": self.part},
            prepare=self._prepare,
            finish=self._finish,
            identity={"policy.model": "tiny", "seed": 0, **identity},
            resume_mode=resume,
            schedule=CheckpointSchedule(interval_steps=2, total_steps=9, keep=keep),
            recovery=self,
            kept=lambda versions: self.kept,
        )
        self.kept: list[int] = []
        self.calls: list[str] = []
        self._reached = reached

    async def save(self, version: int) -> None:
        self.learner.version = self.part.value = version
        await self.checkpoints.save(version)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    async def begin(self) -> None:
        self.calls.append("begin")

    async def recover(self, version: int) -> int:
        self.calls.append(f"recover {version}")
        self.learner.version = max(version, self._reached)
        return self.learner.version

    async def saved(self, version: int) -> None:
        assert latest_complete(self.folder) == self.folder / f"step-{version:06d}"
        self.calls.append(f"saved {version}")

    async def _prepare(self) -> None:
        self.calls.append("prepare")
        self.num_prepared += 1

    async def _finish(self) -> None:
        self.num_finished += 1


class Killed(BaseException):
    """SIGKILL at a file operation: neither this operation nor any later one happens."""


class FileOperations:
    """Counts the file operations below a folder and kills at one of them."""

    EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"})

    def __init__(self) -> None:
        self.folder: str | None = None
        self.count = 0
        self.kill_at: int | None = None
        sys.addaudithook(self._on_event)  # a hook stays for ever: it idles while `folder` is None

    @contextmanager
    def below(self, folder: Path, kill_at: int | None = None) -> Iterator[None]:
        self.folder, self.count, self.kill_at = str(folder), 0, kill_at
        try:
            yield
        finally:
            self.folder = None

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None or event not in self.EVENTS or not args:
            return
        if isinstance(args[0], str | os.PathLike) and os.fspath(args[0]).startswith(self.folder):
            self.count += 1
            if self.kill_at is not None and self.count >= self.kill_at:
                raise Killed


@pytest.fixture(scope="module")
def operations() -> FileOperations:
    return FileOperations()


async def test_the_warm_start_is_saved_as_version_0_and_never_done_again(tmp_path: Path) -> None:
    first = Setup(tmp_path)
    assert await first.checkpoints.resume() == 0
    second = Setup(tmp_path)
    assert await second.checkpoints.resume() == 0
    assert (first.num_prepared, second.num_prepared) == (1, 0)


async def test_a_run_that_was_killed_while_it_exported_its_policy_exports_it_when_it_goes_on(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        await export_that_fails(tmp_path, Killed())
    again = Setup(tmp_path)
    assert await again.checkpoints.resume() == 9
    assert again.num_finished == 1 and again.names() == ["step-000009"]


async def test_a_run_goes_on_from_where_its_journal_leads_and_saves_what_is_due(tmp_path: Path) -> None:
    first = Setup(tmp_path)
    assert await first.checkpoints.resume() == 0
    assert first.calls == ["begin", "prepare", "saved 0"]
    await first.save(4)
    for reached, calls in ((4, []), (5, []), (6, ["saved 6"]), (9, ["saved 9"])):
        again = Setup(tmp_path / str(reached), reached=reached)
        shutil.copytree(first.folder, again.folder)
        assert await again.checkpoints.resume() == reached
        assert again.calls == ["recover 4", *calls]
        assert again.num_finished == (reached == 9)


async def test_a_checkpoint_that_a_rollback_would_load_is_kept(tmp_path: Path) -> None:
    setup = Setup(tmp_path, keep=1)
    setup.kept = [2]
    for version in (0, 2, 4, 6):
        await setup.save(version)
    assert setup.names() == ["step-000000", "step-000002", "step-000006"]
    found = newest_learner_state(setup.folder, lambda version: version < 6)
    assert found is not None
    assert found[0] == 2
    setup.kept = []
    await setup.save(8)
    assert setup.names() == ["step-000000", "step-000008"]


async def test_a_part_that_was_off_starts_from_its_initial_state(tmp_path: Path) -> None:
    first = Setup(tmp_path)
    await first.save(2)
    second = Setup(tmp_path)
    second.checkpoints.parts = {"part": second.part, "guard": (later := Counting())}
    assert await second.checkpoints.resume() == 2
    assert (second.learner.version, second.part.value, later.value) == (2, 2, Counting().value)


async def test_wherever_a_save_is_killed_a_checkpoint_is_complete(tmp_path: Path, operations: FileOperations) -> None:
    async def prepared(folder: Path) -> Setup:
        setup = Setup(folder, keep=2)
        for version in (2, 4):
            await setup.save(version)
        return setup

    whole = await prepared(tmp_path / "whole")
    with operations.below(whole.folder):
        await whole.save(6)
    assert operations.count > 20, "writing, renaming and pruning are all seen"
    resumed_from = []
    for kill_at in range(1, operations.count + 1):
        setup = await prepared(tmp_path / str(kill_at))
        with pytest.raises(Killed), operations.below(setup.folder, kill_at):
            await setup.save(6)
        after = Setup(tmp_path / str(kill_at))
        version = await after.checkpoints.resume()
        assert (after.learner.version, after.part.value) == (version, version)
        assert not [name for name in after.names() if name.startswith(".")], "leftovers are removed"
        await after.save(6)
        assert latest_complete(after.folder) == after.folder / "step-000006"
        resumed_from.append(version)
    assert sorted(resumed_from) == resumed_from, "once the new one is complete it stays"
    assert set(resumed_from) == {4, 6}


async def test_a_damaged_checkpoint_is_skipped_and_rewritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(tmp_path)
    await setup.save(2)
    await setup.save(4)
    swap_a_byte(setup.folder / "step-000004" / "learner" / "rank0.json")
    again = Setup(tmp_path)
    assert await again.checkpoints.resume() == 2
    assert "learner/rank0.json was changed after it was written" in caplog.text
    await again.save(4)
    assert latest_complete(again.folder) == again.folder / "step-000004"


def swap_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


async def test_resume_never_starts_in_an_empty_folder_and_refuses_one_that_holds_a_checkpoint(tmp_path: Path) -> None:
    assert await Setup(tmp_path / "empty", resume=Resume.NEVER).checkpoints.resume() == 0
    await Setup(tmp_path).save(4)
    with pytest.raises(PreflightError, match=r"already holds step 4: set resume=auto to go on, or name=\.\.\."):
        await Setup(tmp_path, resume=Resume.NEVER).checkpoints.resume()


async def test_a_checkpoint_of_another_run_is_refused_and_the_keys_are_named(tmp_path: Path) -> None:
    await Setup(tmp_path).save(4)
    changed = {"policy.model": "big", "key.of.a.newer.version": 1}
    with pytest.raises(PreflightError, match=r'was saved with policy\.model="tiny" \(now "big"\): set these keys back'):
        await Setup(tmp_path, **changed).checkpoints.resume()


async def no_space(*args: Any) -> bool:
    raise OSError(28, "No space left on device")


async def test_a_full_disk_is_named_with_the_next_action(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    await setup.save(2)
    setup.learner.save = no_space
    with pytest.raises(CheckpointError, match=r"step 4 could not be written.*No space left.*resume=auto"):
        await setup.checkpoints.save(4)
    assert latest_complete(setup.folder) == setup.folder / "step-000002"
    assert [path.name for path in setup.folder.iterdir()] == ["step-000002"], "what filled the disk is removed"


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        RuntimeError("rank 0:\nTraceback (most recent call):\n[enforce fail at inline_container.cc:672] . bad pos"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
async def test_a_disk_that_is_full_at_the_export_is_named_whatever_its_class(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(CheckpointError, match="the trained policy could not be written below .*resume=auto") as raised:
        await export_that_fails(tmp_path, error)
    assert "\n" not in str(raised.value)


async def test_other_errors_of_the_export_travel_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await export_that_fails(tmp_path, FileNotFoundError(2, "No such file", "template.json"))


async def export_that_fails(folder: Path, error: BaseException) -> None:
    async def fail() -> None:
        raise error

    setup = Setup(folder)
    setup.checkpoints.finish = fail
    setup.learner.version = setup.checkpoints.schedule.total_steps
    await setup.checkpoints.maybe_save(setup.learner.version)


async def test_the_configuration_is_accepted_once_the_checkpoint_is_loaded(tmp_path: Path) -> None:
    class Other(FakeLearner):
        async def load(self, folder: Path) -> int:
            raise ValueError("the tensors of another policy")

    accepted: list[str] = []
    setup = Setup(tmp_path)
    setup.checkpoints.on_accepted = lambda: accepted.append("new")
    await setup.checkpoints.resume()
    again = Setup(tmp_path)
    again.checkpoints.learner, again.checkpoints.on_accepted = Other(), lambda: accepted.append("other")
    message = r"step-000000 cannot be loaded .*tensors of another policy\): set policy"
    with pytest.raises(CheckpointError, match=message):
        await again.checkpoints.resume()
    assert accepted == ["new"]
    again.checkpoints.learner = again.learner
    await again.checkpoints.resume()
    assert accepted == ["new", "other"]


class SlowLearner(FakeLearner):
    """Has a copy on disk once `is_free` is set; `num_lost` copies are lost instead."""

    def __init__(self, num_lost: int = 0) -> None:
        super().__init__()
        self.is_free = asyncio.Event()
        self.calls: list[str] = []
        self._num_lost = num_lost

    async def save(self, folder: Path) -> None:
        await super().save(folder)
        self.calls.append(f"save {self.version}")

    async def finish_save(self) -> bool:
        await self.is_free.wait()
        self.calls.append("finish")
        self._num_lost -= 1
        return self._num_lost < 0


def beside(tmp_path: Path, num_lost: int = 0) -> tuple[Setup, SlowLearner]:
    setup, learner = Setup(tmp_path, keep=100), SlowLearner(num_lost)
    setup.learner = setup.checkpoints.learner = learner
    return setup, learner


async def test_the_run_goes_on_while_a_checkpoint_is_written_and_it_holds_the_state_of_its_step(tmp_path: Path) -> None:
    setup, learner = beside(tmp_path)
    async with asyncio.timeout(5), setup.checkpoints.writing():
        for version in (1, 2, 3):
            learner.version = setup.part.value = version
            await setup.checkpoints.maybe_save(version)
        assert latest_complete(setup.folder) is None and learner.calls == ["save 2"]
        learner.is_free.set()
    assert setup.calls == ["saved 2"], "it is complete before the run ends"
    after = Setup(tmp_path)
    assert (await after.checkpoints.resume(), after.learner.version, after.part.value) == (2, 2, 2)


async def test_one_checkpoint_is_written_at_a_time_and_the_last_one_is_waited_for(tmp_path: Path) -> None:
    setup, learner = beside(tmp_path)
    learner.is_free.set()
    async with setup.checkpoints.writing():
        for version in range(1, 10):
            learner.version = version
            await setup.checkpoints.maybe_save(version)
            assert setup.num_finished == (version == 9), "the run is finished once, after its last checkpoint"
        assert setup.names() == [f"step-{version:06d}" for version in (2, 4, 6, 8, 9)]
    assert learner.calls == [call for version in (2, 4, 6, 8, 9) for call in (f"save {version}", "finish")]


async def test_a_copy_that_was_lost_with_a_rank_is_made_up_for_at_the_next_step(tmp_path: Path) -> None:
    setup, learner = beside(tmp_path, num_lost=1)
    learner.is_free.set()
    async with setup.checkpoints.writing():
        for version in (2, 3):
            learner.version = version
            await setup.checkpoints.maybe_save(version)
            await until(lambda: len(asyncio.all_tasks()) == 1)  # the write has ended
    assert setup.names() == ["step-000003"] and setup.calls == ["saved 3"]


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_the_next_action(tmp_path: Path) -> None:
    setup, learner = beside(tmp_path)
    learner.finish_save = no_space
    with pytest.raises(CheckpointError, match="step 2 could not be written.*No space left"):
        async with asyncio.timeout(5), setup.checkpoints.writing():
            await setup.checkpoints.maybe_save(2)
            await asyncio.Event().wait()


async def test_a_run_that_fails_completes_the_checkpoint_that_it_is_writing(tmp_path: Path) -> None:
    setup, learner = beside(tmp_path)
    with pytest.raises(KeyError):
        async with asyncio.timeout(5), setup.checkpoints.writing():
            await setup.checkpoints.maybe_save(2)
            asyncio.get_running_loop().call_later(0.01, learner.is_free.set)
            raise KeyError("a reward function failed")
    assert latest_complete(setup.folder) == setup.folder / "step-000002"


def rewritten(path: Path, change: Any) -> None:
    """Changes the state and lists the new file, as another program would."""
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(change(state)))
    (path / "manifest.json").unlink()
    _write_manifest(path)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: os.truncate(path / "state.json", 20), "state.json has 20 bytes instead of"),
        (lambda path: os.truncate(path / "learner/rank1.json", 0), "learner/rank1.json has 0 bytes instead of"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda path: (path / "manifest.json").write_text("[1]"), "its manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_bytes(b"\x80PK\xff"), "its manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text('{"files": {"a": 1}}'), "its manifest.json cannot be read"),
        (lambda path: (path / "learner/rank0.json").unlink(), "learner/rank0.json is missing"),
        (lambda path: swap_a_byte(path / "learner/rank1.json"), "learner/rank1.json was changed after"),
        (lambda path: rewritten(path, lambda state: {**state, "version": 77}), "its state.json is of version 77"),
        (lambda path: rewritten(path, lambda state: {"global_step": 3}), "its state.json cannot be read"),
        (lambda path: rewritten(path, lambda state: {**state, "parts": None}), "its state.json cannot be read"),
    ],
)
@pytest.mark.parametrize("resume", list(Resume))
async def test_unreadable_checkpoints_stop_the_start(tmp_path: Path, damage: Any, fault: str, resume: Resume) -> None:
    setup = Setup(tmp_path)
    for version in (0, 2, 4):
        await setup.save(version)
        damage(setup.folder / f"step-{version:06d}")
    before = {path: path.read_bytes() for path in setup.folder.rglob("*") if path.is_file()}
    again = Setup(tmp_path, resume=resume)
    reasons = rf"none can be read \(.*step-000004: {fault}.*\), so nothing is overwritten: restore"
    message = "already holds step 4" if resume is Resume.NEVER else reasons
    with pytest.raises(PreflightError, match=message):
        await again.checkpoints.resume()
    assert (again.calls, again.num_prepared) == ([], 0)
    assert {path: path.read_bytes() for path in setup.folder.rglob("*") if path.is_file()} == before


async def test_a_checkpoint_that_may_not_be_opened_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(tmp_path)
    for version in (2, 4):
        await setup.save(version)
    opened = Path.open

    def forbidden(path: Path, *args: Any, **options: Any) -> Any:
        if path.parent.parent.name == "step-000004":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", forbidden)
    assert await Setup(tmp_path).checkpoints.resume() == 2
    assert "step-000002 is the newest checkpoint that can be read (step-000004: learner/rank0.json" in caplog.text
    assert "cannot be read (Permission denied)" in caplog.text


async def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".tmp-0-ab12").mkdir(parents=True)
    assert await Setup(tmp_path).checkpoints.resume() == 0


def test_paths_of_a_run_may_be_spelled_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    saved = {"data.path": "data", "policy.model": "org/name", "data.processor": "mine.py:Chat"}
    (tmp_path / "state.json").write_text(json.dumps({"identity": saved}))
    for spelled in ("./data", "link", str(tmp_path / "data" / ".." / "data")):
        refuse_other_run(tmp_path, {**saved, "data.path": spelled, "data.processor": f"{tmp_path}/mine.py:Chat"})
    for key, other in (("data.path", "other"), ("policy.model", "org/other"), ("data.processor", "mine.py:Other")):
        with pytest.raises(PreflightError, match=key):
            refuse_other_run(tmp_path, {**saved, key: other})
