"""The first hour: words as users write them, runs by name, one file of rows, functions of a notebook."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mobula.actors.datasets.open_split import Splits
from mobula.actors.datasets.rows import Row, Split
from mobula.cluster.errors import PreflightError, SplitNotFoundError
from mobula.cluster.metrics.step_records import EvaluationRecord
from mobula.configs.errors import ConfigError
from mobula.configs.load import dump_config, load_config
from mobula.deploy import api
from mobula.deploy.cli import app
from mobula.deploy.host.session import NUM_SESSIONS, SESSION_MARK, forget_sessions
from mobula.deploy.pages.report import accuracy_chart, answers
from mobula.deploy.preflight.rows import SHARED, Seen
from mobula.deploy.run.run_client import config_to_go_on, named_folder

REWARD = "def closeness(request):\n    return 0.5\n\n\ndef length(request):\n    return 1.0\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def test_a_function_of_your_own_is_one_word(here: Path) -> None:
    config = load_config(["experiment=digits", "rewards=reward.py:closeness"])
    [part] = config.rewards.components
    assert (part.name, part.function, config.rewards.accuracy_component) == (
        "closeness", "reward.py:closeness", "closeness",
    )  # fmt: skip
    assert config.rewards.own_measure == "closeness"
    with_options = ["experiment=digits", "rewards=reward.py:closeness", "rewards.components.0.options.most=3"]
    assert load_config(with_options).rewards.components[0].options == {"most": 3}


def test_a_replaced_function_does_not_get_the_options_of_the_one_before(here: Path) -> None:
    word = "rewards.components.0.function=reward.py:closeness"
    assert load_config(["experiment=digits", "rewards=math_answer"]).rewards.components[0].options
    assert load_config(["experiment=digits", "rewards=math_answer", word]).rewards.components[0].options == {}
    options = "rewards.components.0.options={most: 3}"
    given = load_config(["experiment=digits", "rewards=math_answer", options, word])
    assert given.rewards.components[0].options == {"most": 3}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rewards=reward.py", "write reward.py:closeness; it has closeness, length"),
        ("rewards.components.0.function=reward.py", "write reward.py:closeness"),
        ("algorithm=mad.py:mad", "write algorithm.advantage=mad.py:mad or algorithm.loss=mad.py:mad"),
        ("reward=own", "did you mean rewards=OPTION"),
        ("function=reward.py", "did you mean rewards=FILE.py:NAME"),
        ("steps=3", "did you mean num_steps?"),
        ("rewards=maye2", "rewards is maye"),
    ],
)
def test_the_message_names_the_right_word(here: Path, word: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["experiment=digits", word])
    assert said in str(error.value)
    assert len(str(error.value)) < 400, "no list of 26 names"


def test_a_key_with_dashes_is_named_without_them(here: Path) -> None:
    result = CliRunner().invoke(app, ["show-config", "--num_steps", "3"])
    assert result.exit_code == 2 and "num_steps=VALUE" in result.output.replace("\n", " ").replace("│", "")


def write_run(folder: Path, **summary: object) -> Path:
    config = load_config(["experiment=digits", f"name={folder.name}", "num_steps=5"])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_run_is_named_by_its_folder_its_name_or_latest(here: Path) -> None:
    run = write_run(here / "runs" / "sums")
    (here / "runs" / "latest").symlink_to("sums")
    assert {named_folder(word).resolve() for word in ("sums", "runs/sums", run, "latest", "runs/latest", None)} == {run}
    with pytest.raises(PreflightError, match="runs has sums"):
        named_folder("sum")


def test_a_run_goes_on_with_its_own_configuration_where_it_lies_now(here: Path) -> None:
    write_run(here / "runs" / "sums", status="done", version=5)
    with pytest.raises(PreflightError, match=r"has trained its 5 steps: add num_steps=\+10"):
        config_to_go_on("sums", [])
    (here / "runs" / "sums").rename(here / "moved")
    config = config_to_go_on("moved", ["num_steps=+10"])
    assert (config.num_steps, config.resume, config.run_folder) == (15, "auto", here / "moved")


def rows(*questions: str) -> tuple[Row, ...]:
    return tuple(Row(f"row-{n}", question, "1", "1") for n, question in enumerate(questions))


def reader_of(**splits: tuple[Row, ...]):
    def read(name: str) -> Split[Row]:
        if name not in splits:
            raise SplitNotFoundError(f"{name}.jsonl does not exist")
        return Split(name, splits[name], ())

    return read


def test_rows_are_held_out_where_there_is_train_alone() -> None:
    whole = rows(*(f"{n}?" for n in range(40)))
    splits = Splits(reader_of(train=whole), 0.1)
    train, validation = (splits(name).rows for name in ("train", "validation"))
    assert (len(train), len(validation)) == (36, 4)
    assert sorted(row.sample_id for row in (*train, *validation)) == sorted(row.sample_id for row in whole)
    assert splits("test").rows == validation, "the same rows in every run and split"
    assert Splits(reader_of(train=whole), 0.1)("validation").rows == validation
    with pytest.raises(SplitNotFoundError):
        Splits(reader_of(train=whole), 0.0)("validation")


def test_splits_that_are_there_are_read_as_they_are() -> None:
    splits = Splits(reader_of(train=rows("a?", "b?"), validation=rows("c?")), 0.5)
    assert (len(splits("train").rows), splits("test").rows) == (2, rows("c?"))


def test_rows_of_two_splits_are_noted() -> None:
    config, seen = load_config(["experiment=digits"]), Seen()
    for row in rows("a?", "b?"):
        assert SHARED not in list(seen.notes(config, "train", row))
    shared, other = rows("b?", "c?")
    assert SHARED in list(seen.notes(config, "validation", shared))
    assert SHARED not in list(seen.notes(config, "validation", other))


def test_a_mean_that_is_no_share_has_its_own_name_and_axis() -> None:
    score = EvaluationRecord(0, 12.5, 11, 14, 8, measure="closeness")
    share = EvaluationRecord(0, 0.5, 0.4, 0.6, 8)
    assert (accuracy_chart([], [score]).title, accuracy_chart([], [score]).domain) == ("Closeness", None)
    assert (accuracy_chart([], [share]).title, accuracy_chart([], [share]).domain) == ("Accuracy", (0.0, 1.0))


def test_a_reference_is_shown_once() -> None:
    assert answers(("5", "\\boxed{5}")) == ["5"]
    assert answers(("5", "It is 5.")) == ["5", "It is 5."]


def test_session_folders_of_ended_runs_are_removed_but_the_newest(tmp_path: Path) -> None:
    for n in range(NUM_SESSIONS + 2):
        session = tmp_path / f"session_2026-01-01_00-00-0{n}_0_{2**22 + n}"
        session.mkdir()
        (session / SESSION_MARK).touch()
        os.utime(session / SESSION_MARK, (n, n))
    others = [tmp_path / "session_2026-01-01_00-00-00_0_1", tmp_path / "session_2020-01-01_00-00-00_0_4194999"]
    others[0].mkdir()
    (others[0] / SESSION_MARK).touch()  # its driver, process 1, is alive
    os.utime(others[0] / SESSION_MARK, (0, 0))
    others[1].mkdir()  # of another program
    forget_sessions(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in others} <= left and len(left) == NUM_SESSIONS + 2


def test_python_objects_become_files_of_the_run_folder(here: Path) -> None:
    bonus = 0.25

    def own(request):
        return bonus

    given = api._Given(Path("runs"), "mine")
    picture = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    table = [{"question": "<image>?", "answer": str(n), "images": [picture]} for n in range(4)]
    overrides = {"num_steps": 3, "learner": {"learning_rate": 1e-5}, "algorithm.kl.coef": 0.0}
    (here / "model").mkdir()
    words = given.words("model", table, [own, ("format", 0.2)], "rloo", None, "laptop", overrides)
    config = load_config(words)
    first, second = config.rewards.components
    assert (first.name, first.weight, second.function, second.weight) == ("own", 1.0, "format", 0.2)
    assert (config.num_steps, config.learner.learning_rate, config.algorithm.kl.coef) == (3, 1e-5, 0.0)
    assert (config.algorithm.advantage, config.data.kind, config.run_folder) == (
        "rloo",
        "huggingface",
        Path("runs/mine"),
    )
    inputs = here / "runs" / "mine" / "inputs"
    assert pickle.loads((inputs / "own.pkl").read_bytes())(None) == 0.25, "by value, with what it closes over"
    assert "return bonus" in (inputs / "own.py").read_text(), "its source is kept"
    plain = api._Given(Path("runs"), "plain").words(
        "model", [{"question": "?", "answer": "1"}], None, None, None, "laptop", {}
    )
    assert load_config(plain).data.kind == "jsonl" and (here / "runs/plain/inputs/data/train.jsonl").is_file()


def test_the_interface_lists_its_nouns() -> None:
    import mobula

    assert dir(mobula) == ["Run", "diagnose", "evaluate", "export", "load_config", "plan", "train"]
    assert all(getattr(mobula, name).__doc__ for name in dir(mobula))
