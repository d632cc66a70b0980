"""Traces of a run, and torch's profiler around the updates that the configuration names."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeRollouts
from http_servers import Reply, Scripted, serving
from metrics_data import make_metrics
from runs import Run

from mobula.cluster.errors import PreflightError, RolloutError
from mobula.cluster.records.trajectory import Generated, Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.tracing import tracer as built
from mobula.cluster.tracing.profiler import UpdateProfiler
from mobula.cluster.tracing.tracer import ChromeTraceSink, RunTracer, Span, Stage, build_tracer
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config

MS = 1_000_000


@dataclass
class Recorded:
    """A sink that keeps everything."""

    name: str = "recorded"
    spans: list[Span] = field(default_factory=list)
    wholes: list[Span] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)

    def record(self, span: Span) -> None:
        self.spans.append(span)

    def finish(self, whole: Span) -> None:
        self.wholes.append(whole)

    def begin_step(self, step: int) -> None: ...

    def end_step(self, step: int, whole: Span) -> None:
        self.steps.append(whole)

    def close(self) -> None: ...


class Attempting(FakeRollouts):
    """Fakes that make attempts as a rollout actor's client does."""

    def __init__(self, table: InFlightRequests, fault: Callable[[str, int], Exception | None]) -> None:
        super().__init__(fault=fault)
        self._table = table

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        self._table.of(prompt, settings).next_attempt()
        return await super().generate(prompt, settings)


def traced_run(folder: Path, tracer: RunTracer, **options: Any) -> Run:
    """A run of fakes that is wired as `deploy/wiring/build.py` does it."""
    table = InFlightRequests(64)
    table.on_attempt = tracer.attempt
    fault = options.pop("fault", lambda prompt_id, attempt: None)
    run = Run(folder, rollouts=Attempting(table, fault), tracer=tracer, **options)
    run.controller = replace(run.controller, metrics=make_metrics([], time.perf_counter, tracer=tracer))
    return run


def traced(*sinks: Any) -> RunTracer:
    ticks = itertools.count(1_700_000_000_000_000_000, MS)
    return RunTracer(sinks, clock=lambda: next(ticks))


async def test_a_trained_prompt_went_through_every_stage_in_order(tmp_path: Path) -> None:
    kept = Recorded()
    await traced_run(tmp_path, traced(kept), total_steps=3).go()
    trained = [whole for whole in kept.wholes if whole.attributes["outcome"] == "trained"]
    assert len(trained) == 3 * 2
    for whole in trained:
        stages = [span for span in kept.spans if span.trace == whole.trace]
        assert [span.name for span in stages] == list(Stage)
        times = [time for span in stages for time in (span.start_ns, span.end_ns)]
        assert times == sorted(times)
        assert whole.start_ns == times[0] and whole.end_ns > times[-1]
        assert stages[1].attributes["responses"] == 2 and stages[1].attributes["tokens"] > 0
    assert sorted({span.attributes["version"] for span in kept.spans if span.name == Stage.TRAINED}) == [1, 2, 3]


async def test_a_step_holds_its_phases(tmp_path: Path) -> None:
    kept = Recorded()
    await traced_run(tmp_path, traced(kept), total_steps=2).go()
    assert [(whole.trace, whole.attributes["step"]) for whole in kept.steps] == [("step 1", 1), ("step 2", 2)]
    phases = [span for span in kept.spans if span.trace == "step 1"]
    names = ["wait_for_rollouts", "reference", "update", "evaluation", "weight_sync", "evaluation", "checkpoint"]
    assert [span.name for span in phases] == names
    assert all(kept.steps[0].start_ns < span.start_ns < span.end_ns < kept.steps[0].end_ns for span in phases)


async def test_a_rejected_and_a_failed_prompt_end_with_the_reason(tmp_path: Path) -> None:
    kept = Recorded()

    def values(prompt_id: str) -> tuple[float, float]:
        return (0.5, 0.5) if "/1/" in prompt_id else (0.0, 1.0)

    await traced_run(tmp_path, traced(kept), total_steps=2, drop_uniform=True, values=values).go()
    rejected = [whole for whole in kept.wholes if whole.attributes["outcome"] == "uniform"]
    assert rejected and all("/1/" in whole.trace for whole in rejected)
    kept = Recorded()
    fault = RolloutError("bad")
    broken = traced_run(tmp_path / "broken", traced(kept), total_steps=2, fault=lambda prompt_id, n: fault)
    with pytest.raises(RolloutError):
        await broken.go()
    assert "RolloutError" in {whole.attributes["outcome"] for whole in kept.wholes}


async def test_a_sink_that_fails_is_dropped_and_the_run_goes_on(tmp_path: Path, caplog: Any) -> None:
    class Full(Recorded):
        def record(self, span: Span) -> None:
            raise OSError("no space left")

    kept = Recorded()
    assert await traced_run(tmp_path, traced(Full(name="full"), kept), total_steps=2).go() == 2
    assert kept.spans and caplog.text.count("trace sink full failed") == 1


async def test_without_a_sink_nothing_is_measured_or_kept(tmp_path: Path) -> None:
    tracer = build_tracer(load_config(["experiment=digits"]).tracing, "digits", tmp_path / "off")
    await traced_run(tmp_path / "run", tracer, total_steps=2).go()
    assert not tracer._first and not tracer._open and not (tmp_path / "off").exists()


async def test_a_chrome_trace_holds_the_step_and_the_prompts_that_overlap_it(tmp_path: Path) -> None:
    run = traced_run(tmp_path / "run", traced(ChromeTraceSink(tmp_path, [2])), total_steps=3, max_staleness=1)
    await run.go()
    [path] = tmp_path.glob("step-*.json")
    assert path.name == "step-000002.json"
    events = json.loads(path.read_text())["traceEvents"]
    loop = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1}
    assert loop >= {"step", "wait_for_rollouts", "update"}
    [step] = [event for event in events if event["name"] == "step"]
    prompts = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert {event["name"] for event in prompts} >= {"trained", "buffered"}
    assert all(event["ts"] < step["dur"] and event["ts"] + event["dur"] > 0 for event in prompts)
    rows = {event["tid"] for event in prompts}
    named = {event["tid"] for event in events if event["name"] == "thread_name" and event["pid"] == 2}
    assert rows == named and len({(e["tid"], e["args"]["trace"]) for e in prompts}) == len(rows)


async def test_the_file_has_a_line_a_span_under_its_prompt(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")
    config = load_config(["experiment=digits", "tracing.exporter=file"])
    tracing = build_tracer(config.tracing, "digits", tmp_path)
    await traced_run(tmp_path / "run", tracing, total_steps=2).go()
    tracing.close()
    spans = [json.loads(line) for line in (tmp_path / "traces" / "spans.jsonl").read_text().splitlines()]
    roots = {span["context"]["span_id"]: span for span in spans if span["parent_id"] is None}
    prompts = [span for span in roots.values() if span["attributes"].get("mobula.outcome") == "trained"]
    assert len(prompts) == 2 * 2
    for root in prompts:
        children = [span for span in spans if span["parent_id"] == root["context"]["span_id"]]
        assert [child["name"] for child in children] == list(Stage)
        assert {child["context"]["trace_id"] for child in children} == {root["context"]["trace_id"]}
        assert root["start_time"] == children[0]["start_time"] and root["end_time"] >= children[-1]["end_time"]
    assert {span["name"] for span in roots.values()} == {"prompt", "step"}
    assert spans[0]["resource"]["attributes"]["mobula.run"] == "digits"


async def test_a_collector_gets_the_spans_over_http(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `tracing` is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector = Scripted(lambda number, body: Reply(), parse=bytes)
    with serving(collector) as running:
        words = ["experiment=digits", "tracing.exporter=otlp", f"tracing.address={running.url}/v1/traces"]
        tracing = build_tracer(load_config(words).tracing, "digits", tmp_path)
        await traced_run(tmp_path / "run", tracing, total_steps=2).go()
        tracing.close()
    names = []
    for body, headers in zip(collector.bodies, collector.headers, strict=True):
        is_packed = headers.get("content-encoding") == "gzip"
        request = ExportTraceServiceRequest.FromString(gzip.decompress(body) if is_packed else body)
        names += [s.name for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert names.count("trained") == 2 * 2 and names.count("step") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tracing.exporter=otlp"], "exporter=otlp sends to an address"),
        (["tracing.address=http://127.0.0.1:4318/v1/traces"], "exporter=otlp sends to an address"),
        (["tracing.exporter=otlp", "tracing.address=http://me:s3cret@there/v1"], "tracing.address has credentials"),
        (["num_steps=5", "tracing.chrome_steps=[3,6]"], r"\[3, 6\] has steps that are not between 1 and num_steps=5"),
        (["num_steps=5", "tracing.profile_steps=[9]"], "tracing.profile_steps"),
    ],
)
def test_settings_that_contradict_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load_config(["experiment=digits", *words])
    assert "s3cret" not in str(refused.value)


def test_an_exporter_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built, "_is_installed", lambda name: False)
    config = load_config(["experiment=digits", "tracing.exporter=file"])
    with pytest.raises(PreflightError, match=r"needs opentelemetry.sdk, .*pip install 'mobula\[tracing\]'"):
        built.refuse_missing_exporter(config.tracing)


def update(profiler: UpdateProfiler, version: int) -> None:
    """An update that is one product of matrices."""
    with profiler.update(version):
        torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_named_updates_leave_a_trace_of_their_operators(tmp_path: Path) -> None:
    profiler = UpdateProfiler([2, 3], tmp_path, 1, "cpu")
    for version in (1, 2, 3, 4):
        update(profiler, version)
    found = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert found == ["update-000002-rank-1.json", "update-000003-rank-1.json"]
    events = json.loads((tmp_path / "traces" / found[0]).read_text())["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}


def test_without_steps_nothing_is_written(tmp_path: Path) -> None:
    update(UpdateProfiler([], tmp_path, 0, "cpu"), 1)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_costs_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "traces").write_text("in the way")
    update(UpdateProfiler([1], tmp_path, 0, "cpu"), 1)
    assert "the profile of update 1 could not be written" in caplog.text
