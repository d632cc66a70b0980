"""The record of what was trained on: nothing is lost on the way to disk and back, and no file is ever half."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from fakes import make_group, make_prompt, make_scored

from cluster.media import MediaHandle
from cluster.trajectory import MediaSpan, Prompt, Reward, ScoredGroup, TrajectoryGroup
from cluster.trajectory_log import TrajectoryLog


def picture_prompt() -> Prompt:
    return Prompt(
        prompt_id="0/3/row-3",
        sample_id="row-3",
        text="which digit?",
        compact_ids=np.array([5, 99, 6], dtype=np.int32),
        expanded_ids=np.array([5, 99, 99, 6], dtype=np.int32),
        media=(MediaHandle("k" * 64, "image", 1234, object(), "images/3.png"),),
        media_spans=(MediaSpan(1, 3),),
        references=("7", "seven"),
        metadata={"level": 2},
    )


def assert_equal(read: TrajectoryGroup, written: TrajectoryGroup) -> None:
    ours, theirs = read.prompt, written.prompt
    for name in ("prompt_id", "sample_id", "text", "media", "media_spans", "references", "metadata"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [m.source for m in ours.media] == [m.source for m in theirs.media]
    pairs = [(ours.compact_ids, theirs.compact_ids), (ours.expanded_ids, theirs.expanded_ids)]
    for a, b in zip(read.trajectories, written.trajectories, strict=True):
        for name in ("trajectory_id", "weight_spans", "finish_reason", "response"):
            assert getattr(a, name) == getattr(b, name), name
        pairs += [
            (a.actions.token_ids, b.actions.token_ids),
            (a.behavior_logprobs, b.behavior_logprobs),
            (a.action_mask, b.action_mask),
        ]
    for array, expected in pairs:
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_a_group_comes_back_as_it_was_trained_on(tmp_path: Path) -> None:
    group = make_group(picture_prompt(), versions=(3, 3, 4, 5))
    rewards = (Reward(0.75, {"accuracy": 1.0, "format": 0.5}, {"accuracy": "7 = 7"}), None)
    log = TrajectoryLog(tmp_path, timeout_s=1)
    log.append(5, [ScoredGroup(group.summary(), group, rewards), make_scored("0/4/s4")])
    first, second = TrajectoryLog(tmp_path, timeout_s=1).read(5)
    assert_equal(first.group, group)
    assert first.rewards == rewards
    assert_equal(second.group, make_group(make_prompt("0/4/s4")))
    assert first.group.prompt.media[0].reference is None


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
