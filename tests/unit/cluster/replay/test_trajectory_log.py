"""The record of what was trained on: nothing is lost on the way to disk and back, and no file is ever half."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import make_group, make_prompt, make_scored
from group_data import assert_equal, image_prompt

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.arrow import SCHEMA
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.replay.trajectory_log import TrajectoryLog


def test_a_group_comes_back_as_it_was_trained_on(tmp_path: Path) -> None:
    group = make_group(image_prompt(), versions=(3, 3, 4, 5))
    rewards = (Reward(0.75, {"accuracy": 1.0, "format": 0.5}, {"accuracy": "7 = 7"}), None)
    log = TrajectoryLog(tmp_path, timeout_s=1)
    logprobs = [t.behavior_logprobs - 1 for t in group.trajectories]
    log.append(5, [ScoredGroup(group.summary(), group, rewards, logprobs), make_scored("0/4/s4")])
    first, second = TrajectoryLog(tmp_path, timeout_s=1).read(5)
    assert_equal(first.group, group)
    assert first.rewards == rewards
    assert_equal(second.group, make_group(make_prompt("0/4/s4")))
    assert first.group.prompt.media[0].reference is None
    np.testing.assert_array_equal(first.reference_logprobs, logprobs)
    assert second.reference_logprobs is None


def test_each_step_is_one_file_with_one_row_a_trajectory(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, timeout_s=1)
    for step in (2, 1, 10):
        log.append(step, [make_scored(f"0/{step}/a"), make_scored(f"0/{step}/b")])
    assert log.steps() == [1, 2, 10]
    table = pq.read_table(tmp_path / "step-000010.parquet")
    assert table.num_rows == 4
    assert table["step"].to_pylist() == [10] * 4
    assert table["reward"].to_pylist()[1]["value"] == 1.0


def test_a_step_that_is_trained_again_after_a_resume_replaces_its_record(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, timeout_s=1)
    log.append(1, [make_scored("0/0/a"), make_scored("0/1/b")])
    log.append(1, [make_scored("0/0/a")])
    assert [logged.group.group_id for logged in log.read(1)] == ["0/0/a"]


def test_a_killed_append_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = TrajectoryLog(tmp_path, timeout_s=1)

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        log.append(1, [make_scored("0/0/a")])
    assert TrajectoryLog(tmp_path, timeout_s=1).steps() == []


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def foreign(path: Path) -> None:
    pq.write_table(pa.table({"step": [2], "group_id": ["a"], "text": ["b"]}), path)


def retyped(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.names.index("token_ids"), "token_ids", [["a", "b"]]), path)


def without_rows(path: Path) -> None:
    pq.write_table(SCHEMA.empty_table(), path)


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (cut_off, r"it cannot be read: .*Parquet magic bytes"),
        (foreign, r"missing or of another type: step, trajectory_id, sample_id, .*, reference_logprobs\)"),
        (retyped, r"missing or of another type: token_ids\)"),
        (without_rows, "it has no rows"),
        (missing, "it cannot be read: .*No such file"),
    ],
)
def test_a_file_that_is_no_record_is_named_before_its_rows_are_read(
    tmp_path: Path, spoil: Callable[[Path], None], problem: str
) -> None:
    log = TrajectoryLog(tmp_path, timeout_s=1)
    paths = [log.append(step, [make_scored("0/0/a")]) for step in (1, 2)]
    log.check([1, 2])
    spoil(paths[1])
    log.check([1])
    with pytest.raises(
        PreflightError, match=rf"step-000002\.parquet is no record of a step \(.*{problem}.*put it back"
    ):
        log.check([1, 2])


def test_rows_that_are_damaged_behind_a_good_footer_are_named_when_they_are_read(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, timeout_s=1)
    path = log.append(1, [make_scored("0/0/a")])
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    log.check([1])
    with pytest.raises(PreflightError, match=r"step-000001\.parquet is no record of a step \(it cannot be read"):
        log.read(1)
