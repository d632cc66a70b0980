"""Settings of the parts of one run: those that must be equal, and those whose change is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mobula.cluster.errors import PreflightError
from mobula.cluster.recovery.checkpoints import refuse_other_run
from mobula.cluster.replay.run_identity import changed_settings, run_identity
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.datasets.data_files import KEY, identity_with_data


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
