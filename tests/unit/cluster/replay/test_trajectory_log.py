"""The record of what was trained on, and the settings that parts of a run share."""

from __future__ import annotations

import json
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
from mobula.cluster.recovery.checkpoints import refuse_other_run
from mobula.cluster.replay.run_identity import changed_settings, run_identity
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import KEY, identity_with_data


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


def config(*words: str) -> RunConfig:
    rank = [] if any(word.startswith("policy.lora.rank=") for word in words) else ["policy.lora.rank=4"]
    return load_config(["experiment=digits", *rank, *words])


@pytest.mark.parametrize(
    "word",
    ["policy.lora.rank=8", "policy.lora.rank=0", "policy.lora.alpha=640", "learner.optimizer=muon", "data.path=other"],
)
def test_what_a_checkpoint_depends_on_is_part_of_the_identity(word: str) -> None:
    key = word.partition("=")[0]
    before, now = run_identity(config()), run_identity(config(word))
    assert [name for name in before if before[name] != now[name]] == [key]


def test_the_number_of_ranks_is_part_of_it_with_deepspeed_alone() -> None:
    words = ["resources.learner.num_workers=1"]
    assert run_identity(config(*words)) == run_identity(config("resources.learner.num_workers=2"))
    zero = [run_identity(config("learner=deepspeed", f"resources.learner.num_workers={num}")) for num in (1, 2)]
    assert zero[0] != zero[1]


def test_a_setting_that_changes_how_the_run_learns_is_named_and_one_of_speed_is_not() -> None:
    before = config().model_dump(mode="json")
    words = ["learner.learning_rate=0.5", "algorithm.kl.coef=0.25", "sampler.vllm.enforce_eager=false", "num_steps=7"]
    found = changed_settings(before, config(*words))
    assert set(found) == {"learner.learning_rate", "algorithm.kl.coef", "num_steps"}
    assert found["algorithm.kl.coef"][1] == 0.25
    assert changed_settings({}, config()) == {}, "the configuration of an older version lacks keys"


def test_training_files_of_other_names_or_sizes_are_other_data(tmp_path: Path) -> None:
    run = load_config(["experiment=sft", f"data.path={tmp_path}", "policy=tiny_qwen2_5"])
    assert KEY not in identity_with_data(run)
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "validation.jsonl").write_text("{}\n")
    first = identity_with_data(run)[KEY]
    (tmp_path / "validation.jsonl").write_text("{}\n{}\n")
    assert identity_with_data(run)[KEY] == first
    (tmp_path / "train.jsonl").write_text("{}\n{}\n")
    assert identity_with_data(run)[KEY] != first


@pytest.mark.parametrize(
    ("option", "name", "others"),
    [
        ("jsonl", "train.jsonl", "train.parquet"),
        ("parquet", "train.parquet", "train.jsonl"),
        ("parquet", "data/train-00000-of-00001.parquet", "train.json"),
        ("json", "train.json", "train.jsonl"),
        ("webdataset", "train-0000.tar", "train.jsonl"),
        ("prompts", "train.txt", "train.json"),
        ("huggingface", "train.csv", "train.tar"),
        ("huggingface", "train/data-00000-of-00001.arrow", "train.txt"),
    ],
)
def test_the_files_that_the_reader_takes_are_the_data(tmp_path: Path, option: str, name: str, others: str) -> None:
    split = ["data.splits={train: 'train[:50%]'}"] if option == "huggingface" else []
    run = load_config(["experiment=own", f"data={option}", f"data.path={tmp_path}", *split], is_complete=False)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a")
    first = identity_with_data(run)[KEY]
    (tmp_path / others).write_text("b")
    assert identity_with_data(run)[KEY] == first
    (tmp_path / name).write_text("c")
    assert identity_with_data(run)[KEY] != first


def test_a_checkpoint_of_other_usable_rows_is_refused_once_they_are_known(tmp_path: Path) -> None:
    run = config("name=rows", f"folder={tmp_path}")
    (tmp_path / "state.json").write_text(json.dumps({"identity": identity_with_data(run, "7 of 8, 0a")}))
    refuse_other_run(tmp_path, identity_with_data(run))  # they are not checked yet
    refuse_other_run(tmp_path, identity_with_data(run, "7 of 8, 0a"))
    with pytest.raises(PreflightError, match=r'usable rows .*="7 of 8, 0a" \(now "8 of 8, 0b"\): set these keys back'):
        refuse_other_run(tmp_path, identity_with_data(run, "8 of 8, 0b"))
