"""Groups, records and whole run folders of known content, for the tests of metrics and report."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from data_rows import encoded
from fakes import make_trajectory
from PIL import Image, ImageDraw

from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.report.samples import SampleKeeper
from mobula.cluster.metrics.sinks.base import Sink
from mobula.cluster.metrics.sinks.jsonl import JsonlSink
from mobula.cluster.metrics.step_records import EvaluationRecord, StepRecord
from mobula.cluster.metrics.summary import RunFacts, summarize, write_summary
from mobula.cluster.records.media import MediaHandle, MediaSpan, ProcessedMedia
from mobula.cluster.records.trajectory import FinishReason, Prompt, Response, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import ReplayStats, UpdateReport
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer
from mobula.deploy.host.processes import ProcessId
from mobula.deploy.host.run_folder import RECORD_FILE, RunMark, RunRecord

FACTS = RunFacts(seed=7, sampler="vllm", learner_backend="fsdp2", learner_ranks=2, rollout_actors=2, train_prompts=64)

REPLAY = ReplayStats(num_ready=3, num_taken=2, num_bytes=4096, oldest_age_s=0.5)


class FakeClock:
    """Time that moves only by `pass_s`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


class MemorySink:
    """Keeps what it is given."""

    name = "memory"

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.is_closed = False

    def emit(self, record: StepRecord) -> None:
        self.records.append(record)

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        self.evaluations.append(record)

    def close(self) -> None:
        self.is_closed = True


def fetch_value(references: Sequence[object], *, timeout_s: float, what: str) -> list[object]:
    """`mobula.cluster.runtime.object_store.fetch` for values that are no references."""
    return list(references)


def make_keeper(path: Path, **changes: Any) -> SampleKeeper:
    """Of a run of 20 steps, with a `fetch` of values."""
    least = {"limit": 12, "num_steps": 20, "seed": 1, "version": 0, "fetch": fetch_value, "timeout_s": 1.0}
    return SampleKeeper(path, **{**least, **changes})


def make_metrics(sinks: Sequence[Sink], clock: Callable[[], float], tracer: RunTracer = UNTRACED) -> Metrics:
    return Metrics(sinks, clock, accuracy_component="answer", tracer=tracer)


def digit_image(digit: str, size: int = 56) -> bytes:
    """A PNG with `digit` drawn on it."""
    image = Image.new("L", (size, size), 16)
    ImageDraw.Draw(image).text((size // 3, size // 5), digit, fill=235, font_size=size // 2)
    return encoded(image)


def flat_image(level: int, size: tuple[int, int] = (16, 16)) -> bytes:
    """A PNG of one grey."""
    return encoded(Image.new("RGB", size, (level,) * 3))


def make_group(
    sample_id: str,
    rewards: Sequence[float],
    *,
    spans: Sequence[tuple[int, int]] = ((0, 4),),
    text: str = r"\boxed{3}",
    images: Sequence[bytes] = (),
    finish_reason: FinishReason = FinishReason.STOP,
) -> ScoredGroup:
    """A scored group with one response a reward; `spans` are (version, number of tokens) of every response."""
    processed = [ProcessedMedia("image", {}, png) for png in images]
    media = tuple(MediaHandle(f"{sample_id}-{i}", "image", len(p.thumbnail), p) for i, p in enumerate(processed))
    prompt_text = f"<|im_start|>user\n{'<image>' * len(media)}Which digit is this?<|im_end|>"
    ids = np.arange(6, dtype=np.int32)
    spans_of_media = tuple(MediaSpan(i, i + 1) for i in range(len(media)))
    prompt = Prompt(
        f"0/0/{sample_id}", sample_id, prompt_text, ids, ids, media, media_spans=spans_of_media, references=("3",)
    )
    versions = [version for version, num in spans for _ in range(num)]
    response = Response(text, len(versions), finish_reason is FinishReason.LENGTH)
    trajectories = tuple(
        replace(make_trajectory(f"{prompt.prompt_id}#{i}", versions), finish_reason=finish_reason, response=response)
        for i in range(len(rewards))
    )
    group = TrajectoryGroup(prompt, trajectories)
    scored = tuple(Reward(r, {"answer": r, "format": 1.0}, {"answer": "equal" if r else "not equal"}) for r in rewards)
    return ScoredGroup(group.summary(), group, scored)


def write_run(folder: Path, *, num_steps: int, seed: int = 3, response: str = "", status: str = "done") -> None:
    """A run folder as a real run of `num_steps` leaves it, made through the hub, the sinks and the sample keeper."""
    folder.mkdir(parents=True, exist_ok=True)
    clock = FakeClock()
    keeper = make_keeper(folder / "samples.jsonl", limit=24, num_steps=num_steps, seed=seed)
    sink = JsonlSink(folder / "metrics.jsonl", version=0)
    metrics = Metrics([sink], clock, accuracy_component="answer", samples=[keeper])
    metrics.record_evaluation(EvaluationRecord(0, 0.52, 0.46, 0.58, 256))
    for step, skill in _course(num_steps, random.Random(seed)):
        _one_step(metrics, clock, step, skill, random.Random(f"{seed}/{step}"), response)
        if step % max(1, num_steps // 4) == 0:
            metrics.record_evaluation(EvaluationRecord(step, skill, max(0, skill - 0.04), min(1, skill + 0.03), 256))
    metrics.close()
    summary = summarize(metrics, FACTS, status=status, version=num_steps, wall_s=clock.now + 38)
    write_summary(folder / "summary.json", summary)
    _write_side_files(folder)


def _course(num_steps: int, noise: random.Random) -> Iterator[tuple[int, float]]:
    for step in range(1, num_steps + 1):
        yield step, min(0.99, max(0.05, 0.52 + 0.44 * (1 - math.exp(-4 * step / num_steps)) + noise.gauss(0, 0.02)))


def _one_step(metrics: Metrics, clock: FakeClock, step: int, skill: float, noise: random.Random, response: str) -> None:
    groups = []
    for i in range(4):
        digit = str(noise.randrange(10))
        answer = response or f"The image shows the digit {digit}.\nThe answer is \\boxed{{{digit}}}."
        rewards = [float(noise.random() < skill) for _ in range(4)]
        spans = ((step - 1, 12), (max(0, step - 2), noise.randrange(1, 9))) if step > 1 else ((0, 14),)
        finish = FinishReason.LENGTH if noise.random() < 0.06 else FinishReason.STOP
        images = [digit_image(digit)] * (1 + (i == 0))
        name = f"train-{4 * step + i:05d}"
        groups.append(make_group(name, rewards, spans=spans, text=answer, images=images, finish_reason=finish))
    with metrics.step(step) as scope:
        for phase, seconds in {"wait_for_rollouts": 0.9, "reference": 0.2, "update": 0.7, "weight_sync": 0.15}.items():
            with scope.timed(phase):
                clock.pass_s(seconds * noise.uniform(0.8, 1.3) * (14 if step == 1 else 1))
        clock.pass_s(0.05)
        gap = 2e-7 * noise.uniform(0.5, 2)
        update = {
            MetricName.KL: 0.03 * (1 - math.exp(-step / 12)) * noise.uniform(0.7, 1.3),
            MetricName.ENTROPY: 1.1 * math.exp(-step / 30) + noise.uniform(0.1, 0.2),
            MetricName.GRAD_NORM: noise.uniform(0.4, 1.4),
            MetricName.CLIP_FRACTION: noise.uniform(0, 0.02),
            MetricName.LOGPROB_GAP_MEAN: gap,
            MetricName.LOGPROB_GAP_MAX: 12 * gap,
        }
        metrics.count(CounterName.WEIGHT_SYNCS, "published")
        metrics.observe(MetricName.MEDIA_BYTES_UNIQUE, 3.1e6)
        rejected = {"uniform_rewards": step // 2, "too_old": step // 9}
        metrics.set_counts(CounterName.REJECTED, rejected)
        scope.record(groups, UpdateReport(step, update), ReplayStats(2, 4, 81920, 1.2, rejected))


def _write_side_files(folder: Path) -> None:
    roles = [("rollout", 0, [0]), ("rollout", 1, [1]), ("learner", 0, [0]), ("learner", 1, [1]), ("reference", 0, [])]
    plan = [{"role": r, "index": i, "cpus": 0.5, "gpus": 0, "node": "node-7f3a", "cores": c} for r, i, c in roles]
    (folder / "plan.json").write_text(json.dumps(plan))
    skipped = [
        {"sample_id": "train-00017", "reason": "bad_media", "message": "images/17.png is empty (0 bytes)"},
        {"sample_id": "train-00230", "reason": "bad_media", "message": "images/230.png would decode to 4e9 pixels"},
        {"sample_id": "train-00911", "reason": "bad_prompt", "message": "2 placeholders, 1 image"},
    ]
    (folder / "skipped.json").write_text(json.dumps(skipped))
    config = "name: digits-seed7\nseed: 7\nalgorithm:\n  advantage: grpo\n  max_staleness: 1\n"
    config += f"sampler:\n  kind: {FACTS.sampler}\nlearner:\n  backend: {FACTS.learner_backend}\n"
    (folder / "config.yaml").write_text(config)


def go_on(folder: Path, *, start_ticks_off: int = 0, host: str | None = None) -> None:
    """Leave the record of a run whose driver is this process, or was one before it."""
    here = ProcessId.of(os.getpid())
    assert here is not None
    driver = ProcessId(host or here.host, here.pid, here.start_ticks + start_ticks_off)
    mark = RunMark(f"{folder.name}/1", driver)
    RunRecord(folder.name, folder, mark, "10.0.0.1:6379", f"of {folder.name}", None).write(folder / RECORD_FILE)
