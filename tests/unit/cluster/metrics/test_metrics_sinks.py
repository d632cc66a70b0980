"""Sinks: each destination reads back what its sink wrote; a resume goes on with the same run."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from fakes import full_disk
from metrics_data import FakeClock, digit_image
from PIL import Image
from rich.console import Console
from waiting import wait_until

from mobula.cluster.errors import PreflightError
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.hub import informing
from mobula.cluster.metrics.sinks.base import SampleSink
from mobula.cluster.metrics.sinks.console import ConsoleSink, EstimateSink
from mobula.cluster.metrics.sinks.jsonl import JsonlSink, read_records
from mobula.cluster.metrics.sinks.ray_gauges import RaySink
from mobula.cluster.metrics.sinks.trackers import TRACKERS, TrackedRun, refuse_missing, tracker
from mobula.cluster.metrics.step_records import EvaluationRecord, SampleRecord, StepRecord, from_line, to_line
from mobula.cluster.runtime.vitals import EngineLoad, ObjectStoreUse, Vitals
from mobula.cluster.workers.status import InFlightSummary, Progress, RunStatus, WorkerState, WorkerStatus
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.schema.run import MetricsConfig
from mobula.deploy.wiring.persistence import run_id

TAGS = {"run": "digits", "role": "driver", "index": "0"}


def record(step: int, reward: float = 0.5, staleness: dict[int, int] | None = None) -> StepRecord:
    seconds = {"update": 1.0, "other": 0.5, "total": 1.5}
    values = {"reward_mean": reward, "accuracy": reward, "tokens_per_s": 1234.0, "num_samples": 8.0}
    return StepRecord(step, seconds, values, staleness or {0: 80}, {"answer": reward}, {"restarts": {"rollout": 2}})


class FakeSeries:
    """Remembers every value that was set on it."""

    def __init__(self, name: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.tag_keys = name, tag_keys
        self.values: list[tuple[float, dict[str, str]]] = []

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        self.values.append((value, tags))


class FakeRay:
    """Makes series and finds them by name."""

    def __init__(self) -> None:
        self.series: dict[str, FakeSeries] = {}

    def make(self, name: str, description: str, tag_keys: tuple[str, ...]) -> FakeSeries:
        assert description and name not in self.series
        self.series[name] = FakeSeries(name, tag_keys)
        return self.series[name]

    def last(self, name: str) -> tuple[float, dict[str, str]]:
        return self.series[name].values[-1]


def started_sink(heartbeat_s: float = 10, **options: Any) -> tuple[FakeRay, RaySink]:
    ray = FakeRay()
    return ray, RaySink(TAGS, heartbeat_s=heartbeat_s, make_series=ray.make, **options)


@pytest.mark.parametrize("value", [0.25, math.inf, -math.inf, math.nan])
def test_a_record_survives_its_line_and_the_line_is_strict_json(value: float) -> None:
    line = to_line(record(3, value))
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert repr(from_line(line)) == repr(record(3, value)), "a NaN is not equal to itself"


def test_jsonl_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", version=0)
    sink.emit(record(1))
    assert read_records(tmp_path / "metrics.jsonl") == [record(1)]
    sink.close()


def test_jsonl_cuts_what_came_after_the_version_that_a_run_goes_on_from(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path, version=0)
    for step in (1, 2, 3):
        first.emit(record(step))
        first.emit_evaluation(EvaluationRecord(step, 0.5, 0.4, 0.6, 10))
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # killed while it wrote
    second = JsonlSink(path, version=2)
    second.emit(record(3, 0.9))
    second.close()
    steps = [r for r in read_records(path) if isinstance(r, StepRecord)]
    assert [(r.step, r.values["reward_mean"]) for r in steps] == [(1, 0.5), (2, 0.5), (3, 0.9)]
    assert [r.version for r in read_records(path) if isinstance(r, EvaluationRecord)] == [1, 2]


def test_jsonl_on_a_full_disk_keeps_the_earlier_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{to_line(record(1))}\n")
    monkeypatch.setattr(os, "fsync", full_disk)
    sink = JsonlSink(path, version=1)
    assert sink.kept == [record(1)]
    with pytest.raises(OSError, match="No space left"):
        sink.emit(record(2))
    sink.close()
    assert read_records(path) == [record(1)] and [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_broken_line_in_the_middle_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{to_line(record(1))}\nbroken\n{to_line(record(2))}\n")
    with pytest.raises(ValueError, match="line 2 is not JSON: 'broken'"):
        read_records(path)


def events_of(folder: Path) -> Any:
    """What TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_reads_back_what_was_written_and_forgets_steps_that_a_resume_repeats(tmp_path: Path) -> None:
    from mobula.cluster.metrics.sinks.tensorboard import TensorBoardSink

    for version, reward, steps in [(0, 0.1, (1, 2, 3)), (2, 0.7, (3, 4))]:
        time.sleep(1.1 if version else 0.0)  # event files are ordered by whole seconds
        sink = TensorBoardSink(tmp_path, version=version)
        for step in steps:
            sink.emit(record(step, reward))
        sink.emit_evaluation(EvaluationRecord(steps[-1], 0.9, 0.8, 1.0, 10))
        sink.close()
    events = events_of(tmp_path)
    found = [(e.step, round(e.value, 3)) for e in events.Scalars("step/reward_mean")]
    assert found == [(1, 0.1), (2, 0.1), (3, 0.7), (4, 0.7)]
    tags = {"seconds/update", "reward/answer", "count_restarts/rollout", "evaluation/accuracy"}
    assert tags <= set(events.Tags()["scalars"])


def test_tensorboard_shows_responses_as_text_with_their_images(tmp_path: Path) -> None:
    from mobula.cluster.metrics.sinks.tensorboard import TensorBoardSink

    sink = TensorBoardSink(tmp_path, version=0)
    sink.emit_samples([SampleRecord(4, "best", "Which digit?", HOSTILE, ("7",), 1.0, (digit_image("7"),))])
    sink.close()
    events = events_of(tmp_path)
    [text] = events.Tensors("samples/best/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert text.step == 4
    assert "    </code><script>alert(1)</script>" in lines and "    # not a title" in lines
    [image] = events.Images("samples/best/image_0")
    assert (image.step, image.width, image.height) == (4, 56, 56)
    assert image.encoded_image_string == digit_image("7")


def test_a_console_that_is_no_terminal_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock, out = FakeClock(), io.StringIO()
    sink = ConsoleSink(Console(file=out), clock, num_steps=6, version=0, interval_s=5.0)
    clock.pass_s(1000.0)  # the start of a run does not count as a step; each of those takes 1.5 s
    with caplog.at_level(logging.INFO):
        for step in range(1, 7):
            clock.pass_s(2.0)
            sink.emit(record(step))
    sink.close()
    lines = [r.message for r in caplog.records]
    assert [line.split()[1] for line in lines] == ["1/6", "4/6", "6/6"]
    assert lines[0] == "step 1/6  reward 0.500  accuracy 0.500  1,234 tokens/s  0:08 left"
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("total_s", "remaining"), [(2.0, "about 34 s left"), (45.0, "about 13 min left"), (900.0, "about 4 h left")]
)
def test_after_three_steps_a_line_has_the_rest(
    caplog: pytest.LogCaptureFixture, total_s: float, remaining: str
) -> None:
    short, sink = EstimateSink(num_steps=3), EstimateSink(num_steps=30)
    with caplog.at_level(logging.INFO):
        for step in range(1, 4):
            short.emit(record(step))
        assert caplog.records == [], "a run of three steps needs no estimate"
        for step in range(11, 31):  # a run that goes on
            slow = 100.0 if step == 11 else 1.0  # the first step starts up much
            sink.emit(replace(record(step), seconds={"total": slow * total_s}))
    [line] = [r.message for r in caplog.records]
    assert line == f"a step takes {total_s:.1f} s: {remaining} for 17 steps"


def test_a_terminal_shows_a_bar_with_the_numbers_and_held_out_accuracy() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140)
    sink = ConsoleSink(console, FakeClock(), num_steps=6, version=2, interval_s=5.0)
    sink.emit(record(3))
    sink.emit_evaluation(EvaluationRecord(3, 0.9, 0.85, 0.94, 200))
    sink.close()
    text = out.getvalue()
    assert "held-out accuracy at version 3: 0.900 (95 % 0.850 to 0.940, 200 responses)" in text
    assert "3/6" in text and "reward 0.500  accuracy 0.500  1,234 tokens/s" in text


def test_ray_gauges_carry_run_role_index_and_what_splits_them() -> None:
    ray, sink = started_sink()
    sink.emit(record(4))
    sink.close()
    assert ray.last("mobula_reward_mean") == (0.5, TAGS)
    assert ray.last("mobula_step") == (4, TAGS)
    assert (1.5, {**TAGS, "phase": "total"}) in ray.series["mobula_seconds"].values
    assert ray.last("mobula_reward_component") == (0.5, {**TAGS, "component": "answer"})
    assert (2.0, {**TAGS, "reason": "rollout"}) in ray.series["mobula_restarts_total"].values


def test_a_lag_that_is_gone_reads_zero_and_a_number_that_is_none_is_not_exported() -> None:
    ray, sink = started_sink()
    sink.emit(record(1, staleness={0: 70, 1: 10}))
    sink.emit(record(2, math.nan, staleness={0: 80}))
    sink.close()
    tokens = {tags["lag"]: value for value, tags in ray.series["mobula_staleness_tokens"].values}
    assert tokens == {"0": 80.0, "1": 0.0}
    assert [value for value, _ in ray.series["mobula_reward_mean"].values] == [0.5]


def test_ray_gauges_are_set_again_by_the_heartbeat_until_the_sink_is_closed() -> None:
    ray, sink = started_sink(heartbeat_s=0.01)
    sink.emit(record(1))
    values = ray.series["mobula_reward_mean"].values
    wait_until(lambda: len(values) >= 4)
    sink.close()
    num_values = len(values)
    time.sleep(0.05)
    assert len(values) == num_values
    assert not [t for t in threading.enumerate() if t.name == "metrics-heartbeat" and t is sink._thread]


def test_a_heartbeat_that_fails_is_raised_by_the_next_emit() -> None:
    ray, sink = started_sink(heartbeat_s=0.01)
    sink.emit(record(1))
    ray.series["mobula_reward_mean"].set = None  # type: ignore[method-assign, assignment]
    sink._thread.join(timeout=5)
    with pytest.raises(RuntimeError, match="heartbeat"):
        sink.emit(record(2))


def test_ray_metrics_without_run_role_and_index_are_refused() -> None:
    with pytest.raises(ValueError, match="run, role and index"):
        RaySink({"run": "digits"}, heartbeat_s=5, make_series=FakeRay().make)


def test_a_name_that_prometheus_does_not_allow_is_spelled_with_underscores() -> None:
    ray, sink = started_sink()
    sink.emit(StepRecord(1, {}, {"policy/ratio.max": 1.5}, {}, {}, {}))
    sink.close()
    assert ray.last("mobula_policy_ratio_max") == (1.5, TAGS)


def status(phase: str, *workers: WorkerStatus) -> RunStatus:
    in_flight = InFlightSummary(3, "p-1", 4.5)
    return RunStatus("digits", Progress(2, phase, 1.5), 10, in_flight, None, workers, 0, 1, 0.0)


def test_gauges_are_there_before_the_first_step_and_counters_start_at_0() -> None:
    ray, sink = started_sink(now=lambda: 1000.0)
    assert ray.last("mobula_up") == (1.0, TAGS)
    assert ray.last("mobula_last_step_time") == (1000.0, TAGS)
    assert ray.last("mobula_restarts_total") == (0.0, {**TAGS, "reason": "all"})
    assert {f"mobula_{name}_total" for name in CounterName} <= set(ray.series)
    sink.emit(record(1))
    sink.close()
    values = {tags["reason"]: value for value, tags in ray.series["mobula_restarts_total"].values}
    assert values == {"all": 2.0, "rollout": 2.0}


def test_phase_and_workers_go_out_with_the_heartbeat_and_workers_that_left_do_not() -> None:
    ray, sink = started_sink(heartbeat_s=0.01)
    one = WorkerStatus("rollout/0", WorkerState.SERVING, 7, 2, 1)
    two = WorkerStatus("rollout/1", WorkerState.WAITING, None, 0, 4)
    sink.post(status("update", one, two))
    wait_until(lambda: "mobula_worker_restarts" in ray.series)
    sink.post(status("weight_sync", one))
    before = len(ray.series["mobula_worker_restarts"].values)
    wait_until(lambda: len(ray.series["mobula_worker_restarts"].values) > before + 3)
    sink.close()
    phases = {tags["phase"]: value for value, tags in ray.series["mobula_phase"].values}
    assert phases == {"update": 0.0, "weight_sync": 1.0}
    assert ray.last("mobula_worker_version") == (7.0, {**TAGS, "role": "rollout", "index": "0", "node": ""})
    assert all(tags["index"] == "0" for _, tags in ray.series["mobula_worker_restarts"].values[before + 2 :])
    states = {tags["state"]: value for value, tags in ray.series["mobula_workers"].values}
    assert states == {**dict.fromkeys(map(str, WorkerState), 0.0), "serving": 1.0}
    assert ray.last("mobula_in_flight_oldest_age_s") == (4.5, TAGS)


def test_a_worker_has_gauges_with_its_node_and_what_it_cannot_measure_has_none() -> None:
    ray, sink = started_sink(heartbeat_s=0.01)
    of_engine = Vitals("10.0.0.1", 5, 100, 0.5, load=EngineLoad(0.25, 12, 3, 0, 9000), tokens_per_s=80.0)
    engine = WorkerStatus("rollout/0", WorkerState.SERVING, 7, 2, 1, vitals=of_engine)
    rank = WorkerStatus("learner/1", WorkerState.SERVING, 7, 1, 0, vitals=Vitals("10.0.0.2", 6, 200, None, 2**34, 0.9))
    posted = replace(status("update", engine, rank), loop_lag_s=0.2, object_store=ObjectStoreUse(30, 100))
    sink.post(posted)
    wait_until(lambda: "mobula_worker_gpu_bytes" in ray.series)
    sink.close()
    expected = {
        "tokens_per_s": {"10.0.0.1": 80.0},
        "kv_usage": {"10.0.0.1": 0.25},
        "running": {"10.0.0.1": 12.0},
        "queue": {"10.0.0.1": 3.0},
        "busy_share": {"10.0.0.1": 0.5},
        "rss_bytes": {"10.0.0.1": 100.0, "10.0.0.2": 200.0},
        "gpu_bytes": {"10.0.0.2": 2.0**34},
        "gpu_busy_share": {"10.0.0.2": 0.9},
    }
    for name, by_node in expected.items():
        assert {tags["node"]: value for value, tags in ray.series[f"mobula_worker_{name}"].values} == by_node
    for name, value in {"loop_lag_s": 0.2, "object_store_bytes": 30.0, "object_store_size_bytes": 100.0}.items():
        assert ray.last(f"mobula_{name}") == (value, TAGS)


def test_a_full_disk_is_logged_and_the_error_that_ends_a_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(KeyError, match="what ended the run"):
        try:
            raise KeyError("what ended the run")
        finally:
            with informing("the summary"):
                write_atomically(tmp_path / "summary.json", "{}")
    assert "the summary could not be written; the run goes on without it" in caplog.text
    assert list(tmp_path.iterdir()) == [], "no draft is left"


WHY = "{} changes versions that are pinned here, so it is not among the test packages; the extra `{}` has it"

BLOCK = 32 * 1024  # of a LevelDB log

HOSTILE = "</code><script>alert(1)</script>\n# not a title"

RUN_ID = "5f0c1d2e3a4b59687f8e9d0c1b2a3948"

CONFIG = {"seed": 3, "algorithm": {"kl": {"coef": 0.1}}}


def tracked_record(step: int, reward: float) -> StepRecord:
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
    first.emit(tracked_record(1, 0.25))
    first.emit(tracked_record(2, 0.5))
    first.emit_evaluation(EvaluationRecord(1, 0.5, 0.4, 0.6, 10))
    assert isinstance(first, SampleSink)
    first.emit_samples(samples(2))
    first.close()
    second = tracker(name)(run_of(folder))
    second.emit(tracked_record(3, 0.75))
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
    wait_until(lambda: sum(r.WhichOneof("record_type") == "exit" for r in written_records(folder)) == num_parts, 30)
    return written_records(folder)


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


def test_swanlab_keeps_an_offline_run_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab", reason=WHY.format("swanlab", "swanlab"))
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    monkeypatch.setenv("SWANLAB_API_KEY", "x" * 40)
    write_two_parts("swanlab", tmp_path)
    records = []
    for file in sorted(tmp_path.rglob("*.swanlab"), key=lambda path: path.stat().st_mtime):
        reader = DataStoreReader()
        reader.open(file)
        records += [Record.FromString(data) for data in reader]
        reader.close()
    assert {r.start.id for r in records if r.HasField("start")} == {RUN_ID}
    scalars = [(r.scalar.key, r.scalar.step, r.scalar.value.number) for r in records if r.HasField("scalar")]
    assert [row[1:] for row in scalars if row[0] == "step/reward_mean"] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert ("evaluation/accuracy", 1, 0.5) in scalars and ("reward/answer: exact", 1, 0.25) in scalars
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    texts = [path.read_text() for path in files if path.suffix == ".txt"]
    assert len(texts) == 2 and any("Which digit is this?" in text and "seven" in text for text in texts)
    [shown] = [path for path in files if path.suffix == ".png"]
    assert Image.open(shown).size == (56, 56)
    assert not any(b"x" * 40 in path.read_bytes() for path in files), "no key is kept"


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
from test_metrics_sinks import write_two_parts
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
