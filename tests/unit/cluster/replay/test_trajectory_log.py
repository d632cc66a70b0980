"""The trajectory log, and training again from it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fakes import FakeLearner, make_group, make_prompt, make_scored
from group_data import KnownPrompts, OneRank, assert_equal, image_prompt, numbered
from learner_data import random_groups, tiny_config
from transformers import AutoTokenizer

from mobula.cluster.errors import ChangedDataError, PreflightError
from mobula.cluster.records.arrow import SCHEMA
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.recovery.checkpoints import refuse_other_run
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.buffer import LiveGroups
from mobula.cluster.replay.run_identity import DATA_FILES, changed_settings, run_identity
from mobula.cluster.replay.trajectory_log import TrajectoryLog, train_again
from mobula.cluster.roles import UpdateReport
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import identity_with_data
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl


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


FOREIGN = pa.table({"step": [2], "group_id": ["a"], "text": ["b"]})


def retyped(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.names.index("token_ids"), "token_ids", [["a", "b"]]), path)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), r"it cannot be read: .*Parquet magic bytes"),
        (lambda path: pq.write_table(FOREIGN, path), r"another type: step, trajectory_id, .*, reference_logprobs\)"),
        (retyped, r"missing or of another type: token_ids\)"),
        (lambda path: pq.write_table(SCHEMA.empty_table(), path), "it has no rows"),
        (lambda path: path.unlink(), "it cannot be read: .*No such file"),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path: Path, spoil: Callable[[Path], None], problem: str) -> None:
    log = TrajectoryLog(tmp_path, timeout_s=1)
    paths = [log.append(step, [make_scored("0/0/a")]) for step in (1, 2)]
    log.check([1, 2])
    spoil(paths[1])
    log.check([1])
    message = rf"step-000002\.parquet is no record of a step \(.*{problem}.*put it back"
    with pytest.raises(PreflightError, match=message):
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


@pytest.mark.parametrize(
    ("option", "name", "others"),
    [
        ("jsonl", "train.jsonl", "train.parquet"),
        ("jsonl", "train.jsonl", "validation.jsonl"),
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
    assert DATA_FILES not in identity_with_data(run)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a")
    first = identity_with_data(run)[DATA_FILES]
    (tmp_path / others).write_text("b")
    assert identity_with_data(run)[DATA_FILES] == first
    (tmp_path / name).write_text("c")
    assert identity_with_data(run)[DATA_FILES] != first


def test_a_checkpoint_of_other_usable_rows_is_refused_once_they_are_known(tmp_path: Path) -> None:
    run = config("name=rows", f"folder={tmp_path}")
    (tmp_path / "state.json").write_text(json.dumps({"identity": identity_with_data(run, "7 of 8, 0a")}))
    refuse_other_run(tmp_path, identity_with_data(run))  # they are not checked yet
    refuse_other_run(tmp_path, identity_with_data(run, "7 of 8, 0a"))
    with pytest.raises(PreflightError, match=r'usable rows .*="7 of 8, 0a" \(now "8 of 8, 0b"\): set these keys back'):
        refuse_other_run(tmp_path, identity_with_data(run, "8 of 8, 0b"))


def log_in(folder: Path) -> TrajectoryLog:
    return TrajectoryLog(folder / "trajectories", timeout_s=5)


def logged(
    learner: FakeLearner, log: TrajectoryLog, failures: list[str] | None = None, waiting: int = 2
) -> StepLearner:
    on_failed = (failures if failures is not None else []).append
    return StepLearner(learner, log=log, max_waiting=waiting, on_log_failed=on_failed)


def live(groups: Sequence[ScoredGroup]) -> LiveGroups:
    return LiveGroups(KnownPrompts(groups), put=lambda value: value)


async def test_replayed_weights_equal_the_runs_bit_for_bit(tmp_path: Path) -> None:
    model = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [numbered(random_groups(tokenizer, 3, 4, seed), 3 * seed) for seed in range(3)]
    config = tiny_config(model, "algorithm.kl.coef=0.1", "resources.reference.num_workers=1")
    first = OneRank(config)
    run = logged(first, log_in(tmp_path))
    for groups in steps:
        await run.update(groups)
    await run.save(tmp_path / "state")

    again, reports = OneRank(config), []
    every = [group for groups in steps for group in groups]
    assert await train_again(again, log_in(tmp_path), live(every), reports.append) == 3
    ours, theirs = again.weights(), first.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [report.version for report in reports] == [1, 2, 3]
    assert reports[0].metrics["kl"] > 0, "the reference log-probs came along"


async def test_a_log_with_a_gap_is_refused(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    with pytest.raises(PreflightError, match="no recorded step: run with replay.trajectory_log=true"):
        await train_again(FakeLearner(), log, live([]), print)
    for step in (1, 3, 4):
        log.append(step, [make_scored("0/0/s0")])
    with pytest.raises(PreflightError, match=r"lacks step 2 \(1 of 4 are missing\)"):
        await train_again(FakeLearner(), log, live([]), print)


async def test_other_data_are_not_trained_on_in_place_of_the_recorded_ones(tmp_path: Path) -> None:
    group = make_scored("0/0/s0")
    log_in(tmp_path).append(1, [group])
    prompt = dataclasses.replace(group.group.prompt, expanded_ids=group.group.prompt.expanded_ids + 1)
    other = dataclasses.replace(group, group=dataclasses.replace(group.group, prompt=prompt))
    with pytest.raises(ChangedDataError, match="other tokens"):
        await train_again(FakeLearner(), log_in(tmp_path), live([other]), print)


class SlowLog(TrajectoryLog):
    """Writes only when it is let go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, timeout_s=5)
        self.go_on = threading.Event()

    def append(self, step: int, groups: Sequence[ScoredGroup]) -> Path:
        assert self.go_on.wait(30)
        return super().append(step, groups)


async def test_updates_do_not_wait_for_the_log_until_too_many_steps_do(tmp_path: Path) -> None:
    log = SlowLog(tmp_path)
    learner = logged(FakeLearner(), log, waiting=2)
    for n in range(2):
        await asyncio.wait_for(learner.update([make_scored(f"0/{n}/s")]), 30)
    third = asyncio.ensure_future(learner.update([make_scored("0/2/s")]))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not third.done()
    log.go_on.set()
    await asyncio.wait_for(third, 30)
    (tmp_path / "state").mkdir()
    await learner.save(tmp_path / "state")
    assert log.steps() == [1, 2, 3], "a checkpoint has no step that the log has not"
    assert await learner.load(tmp_path / "state") == 3


async def test_a_log_that_fails_is_counted_and_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FullDisk(TrajectoryLog):
        def append(self, step: int, groups: Sequence[ScoredGroup]) -> Path:
            if step == 1:
                raise OSError(28, "No space left on device")
            return super().append(step, groups)

    failures: list[str] = []
    log = FullDisk(tmp_path / "log", timeout_s=5)
    learner = logged(FakeLearner(), log, failures)
    for n in range(2):
        report: UpdateReport = await learner.update([make_scored(f"0/{n}/s")])
        assert report.version == n + 1
    (tmp_path / "state").mkdir()
    await learner.save(tmp_path / "state")
    assert (failures, log.steps()) == (["OSError"], [2])
    assert "step 1 is missing in the trajectory log" in caplog.text
