"""Each tracker's own library reads back what its sink wrote, without a server; a resume goes on with the same run."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from metrics_data import digit_image
from PIL import Image

from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.sinks.base import SampleSink
from mobula.cluster.metrics.sinks.trackers import TRACKERS, TrackedRun, refuse_missing, tracker
from mobula.cluster.metrics.step_records import EvaluationRecord, SampleRecord, StepRecord
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.schema.run import MetricsConfig
from mobula.deploy.wiring.persistence import run_id

WHY = "{} changes versions that are pinned here, so it is not among the test packages; the extra `{}` has it"
BLOCK = 32 * 1024  # of a LevelDB log
HOSTILE = "</code><script>alert(1)</script>\n# not a title"
RUN_ID = "5f0c1d2e3a4b59687f8e9d0c1b2a3948"
CONFIG = {"seed": 3, "algorithm": {"kl": {"coef": 0.1}}}


def record(step: int, reward: float) -> StepRecord:
    seconds, counters = {"update": 1.0, "total": 1.5}, {"restarts": {"rollout_died": 2}}
    return StepRecord(step, seconds, {"reward_mean": reward}, {0: 80}, {"answer: exact": reward}, counters)


def samples(step: int) -> list[SampleRecord]:
    """A response with the image of its prompt, and one without."""
    image = (digit_image("7"),)
    return [
        SampleRecord(step, "best", "Which digit is this?", "seven", ("7",), 1.0, image),
        SampleRecord(step, "worst", "Say a word.", HOSTILE, (), 0.0, ()),
    ]


def run_of(folder: Path) -> TrackedRun:
    return TrackedRun(RUN_ID, "digits", "mobula", folder, "", CONFIG)


def write_two_parts(name: str, folder: Path) -> None:
    """A run of two steps that is resumed for a third one."""
    first = tracker(name)(run_of(folder))
    first.emit(record(1, 0.25))
    first.emit(record(2, 0.5))
    first.emit_evaluation(EvaluationRecord(1, 0.5, 0.4, 0.6, 10))
    assert isinstance(first, SampleSink)
    first.emit_samples(samples(2))
    first.close()
    second = tracker(name)(run_of(folder))
    second.emit(record(3, 0.75))
    second.close()


def test_names_are_those_of_the_configuration_and_of_the_extras() -> None:
    item, _ = get_args(MetricsConfig.model_fields["trackers"].annotation)
    names, _ = get_args(item)
    assert set(get_args(names)) == set(TRACKERS)
    extras = Path(__file__).parents[4].joinpath("pyproject.toml").read_text()
    assert all(f"\n{name} = [" in extras for name in TRACKERS)


def test_a_library_that_is_missing_is_refused_with_what_to_install() -> None:
    refuse_missing(["json"])
    with pytest.raises(PreflightError, match=r"needs no_tracker, .*pip install 'mobula\[no_tracker\]'"):
        refuse_missing(["json", "no_tracker"])


def test_an_address_is_of_one_tracker() -> None:
    words = ["experiment=digits", "metrics.tracker_address=https://wandb.example"]
    assert load_config([*words, "metrics.trackers=[wandb]"]).metrics.trackers == ("wandb",)
    with pytest.raises(ConfigError, match="is the server of one tracker"):
        load_config([*words, "metrics.trackers=[wandb,mlflow]"])


def offline_records(folder: Path, num_parts: int) -> list[Any]:
    """The records of both parts, once W&B's own process has written the last one of each."""
    end = time.monotonic() + 30
    while True:
        records = written_records(folder)
        kinds = [r.WhichOneof("record_type") for r in records]
        if kinds.count("exit") == num_parts:
            return records
        assert time.monotonic() < end, kinds
        time.sleep(0.2)


def written_records(folder: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.rglob("run-*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in leveldb_log(path.read_bytes()):
            found.append(Record())
            found[-1].ParseFromString(data)
    return found


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which W&B puts behind 7 bytes of its own."""
    place, parts, last_of_record = 7, [], (1, 4)  # types: 1 whole, 2 first, 3 middle, 4 last part
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in last_of_record:
            yield b"".join(parts)
            parts = []


def test_wandb_keeps_an_offline_run_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("WANDB_DATA_DIR", "")  # restored at the end, for the sink sets it
    monkeypatch.delenv("WANDB_DATA_DIR")
    write_two_parts("wandb", tmp_path / "run")
    records = offline_records(tmp_path / "run", num_parts=2)
    assert {r.run.run_id for r in records if r.WhichOneof("record_type") == "run"} == {RUN_ID}
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [row["step/reward_mean"] for row in rows if "step/reward_mean" in row] == [0.25, 0.5, 0.75]
    assert [row["trained_step"] for row in rows] == [1, 2, 1, 2, 3]
    assert rows[0]["reward/answer: exact"] == 0.25 and rows[0]["count_restarts/rollout_died"] == 2
    assert rows[2]["evaluation/accuracy"] == 0.5
    assert rows[3]["samples/_type"] == "table-file" and rows[3]["samples/nrows"] == 2
    [table] = (tmp_path / "run").rglob("samples*.table.json")
    written = json.loads(table.read_text())
    assert written["columns"] == ["step", "kind", "prompt", "response", "references", "reward", "image"]
    assert [row[1:6] for row in written["data"]] == [
        ["best", "Which digit is this?", "seven", "7", 1.0],
        ["worst", "Say a word.", HOSTILE, "", 0.0],
    ]
    staged = [path.read_bytes() for path in (tmp_path / "run" / "wandb" / "data").rglob("*") if path.is_file()]
    assert sum(b'"image-file"' in content and b"seven" in content for content in staged) >= 1, "the table to be sent"
    [shown] = (tmp_path / "run").rglob("samples_best*.png")
    assert Image.open(shown).size == (56, 56)
    assert not any(b"x" * 40 in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()), "no key is kept"


def test_mlflow_keeps_files_and_finds_the_run_again(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason=WHY.format("mlflow", "mlflow"))
    write_two_parts("mlflow", tmp_path)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("mobula").experiment_id])
    assert (run.info.run_name, run.info.status) == ("digits", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "step/reward_mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert client.get_metric_history(run.info.run_id, "evaluation/accuracy")[0].value == 0.5
    assert client.get_metric_history(run.info.run_id, "reward/answer_ exact")[0].value == 0.25
    [folder] = tmp_path.rglob("artifacts/samples/step-000002")
    table = json.loads((folder / "samples.json").read_text())["samples"]
    assert [row["response"] for row in table] == ["seven", HOSTILE]
    assert [path.name for path in folder.glob("*.png")] == ["best-0.png"]
    assert Image.open(folder / "best-0.png").size == (56, 56)
    assert "coef: 0.1" in next(tmp_path.rglob("artifacts/config.yaml")).read_text()
    tracker("mlflow")(replace(run_of(tmp_path), run_id="another")).close()
    runs = client.search_runs([client.get_experiment_by_name("mobula").experiment_id])
    assert sorted(run.data.tags["mobula.run_id"] for run in runs) == [RUN_ID, "another"], "one name, two runs"


def test_the_id_of_a_run_is_kept_for_a_resume_and_new_for_another_run_of_the_name(tmp_path: Path) -> None:
    config = load_config(["experiment=digits", f"folder={tmp_path}", "name=a"])
    first = run_id(config)
    assert run_id(config) != first, "a run without a checkpoint is a new run"
    kept = run_id(config)
    (config.run_folder / "checkpoints" / "step-000000").mkdir(parents=True)
    assert run_id(config) == run_id(config) == kept
    shutil.copytree(config.run_folder, tmp_path / "b")
    assert run_id(load_config(["experiment=digits", f"folder={tmp_path}", "name=b"])) != kept, "a copy goes elsewhere"
    assert run_id(config) == kept
    elsewhere = load_config(["experiment=digits", f"folder={tmp_path / 'other'}", "name=a"])
    assert run_id(elsewhere) != kept, "another run of the same name"


TRACKIO = """
import sys
from pathlib import Path
from test_trackers import write_two_parts
write_two_parts("trackio", Path(sys.argv[1]))
from trackio.sqlite_storage import SQLiteStorage
[name] = SQLiteStorage.get_runs("mobula")
rows = SQLiteStorage.get_logs("mobula", name)
[table] = [row["samples"]["_value"] for row in rows if "samples" in row]
print("SAMPLES", [(row["kind"], row["reward"], len(row["images"])) for row in table])
print("READ", name, [(row["step"], row["step/reward_mean"]) for row in rows if "step/reward_mean" in row])
"""


def test_trackio_keeps_a_file_and_goes_on_with_the_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason=WHY.format("trackio", "trackio"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    env.pop("TRACKIO_DIR", None)  # it is read when the library is imported: hence a process of its own
    command = [sys.executable, "-c", TRACKIO, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert "READ digits-5f0c1d2e [(1, 0.25), (2, 0.5), (3, 0.75)]" in done.stdout, done.stdout + done.stderr
    assert "SAMPLES [('best', 1.0, 1), ('worst', 0.0, 0)]" in done.stdout, done.stdout + done.stderr
    assert list((tmp_path / "trackio").glob("*.db")), "it lies below the run folder"
    [image] = (tmp_path / "trackio" / "media").rglob("*.png")
    assert Image.open(image).size == (56, 56)
