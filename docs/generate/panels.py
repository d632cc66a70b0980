"""Panels of the dashboards as data: queries over the gauges of `cluster/metrics/definitions.py`.

Every query keeps the tag `run` and drops Ray's `WorkerId`, which changes with each resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RUNS = 'run=~"$run"'


@dataclass(frozen=True)
class Query:
    """One line, or one set of lines, of a panel."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One chart; `unit` is Grafana's name of a unit."""

    title: str
    unit: str
    queries: tuple[Query, ...]


def gauge(name: str, legend: str = "{{run}}", by: str = "run", **tags: str) -> Query:
    """The newest value of one gauge of ours, split by `by`."""
    chosen = ",".join([RUNS, *(f'{key}="{value}"' for key, value in tags.items())])
    return Query(f"max by ({by}) (ray_mobula_{name}{{{chosen}}})", legend)


def growth(name: str, legend: str = "{{run}} {{reason}}") -> Query:
    """How much a count has grown in ten minutes, by reason; `all` is the sum of the others."""
    return Query(f"increase(max by (run, reason) (ray_mobula_{name}_total{{{RUNS}}})[10m:15s])", legend)


def chart(title: str, unit: str, *queries: Query) -> Panel:
    return Panel(title, unit, queries)


def by_worker(name: str) -> Query:
    """A gauge of every worker."""
    return gauge(name, "{{role}}/{{index}} {{node}}", by="run, role, index, node")


DASHBOARDS: Mapping[str, tuple[Panel, ...]] = {
    "overview": (
        chart("Runs that are up", "none", gauge("up")),
        chart("Step", "none", gauge("step"), gauge("total_steps", "{{run}} of")),
        chart("Phase", "none", Query(f"max by (run, phase) (ray_mobula_phase{{{RUNS}}}) == 1", "{{run}} {{phase}}")),
        chart(
            "Since the last step",
            "s",
            Query(f"time() - max by (run) (ray_mobula_last_step_time{{{RUNS}}})", "{{run}}"),
        ),
        chart("Reward", "none", gauge("reward_mean")),
        chart("Held-out accuracy", "percentunit", gauge("evaluation_accuracy")),
        chart("Generated tokens trained", "none", gauge("tokens_per_s")),
        chart("Seconds of a step", "s", gauge("seconds", "{{run}} {{phase}}", by="run, phase")),
    ),
    "rollout": (
        chart("Workers by state", "none", gauge("workers", "{{role}} {{state}}", by="run, role, state")),
        chart("Prompts in flight", "none", gauge("in_flight")),
        chart("Oldest prompt in flight", "s", gauge("in_flight_oldest_age_s")),
        chart("In flight by worker", "none", by_worker("worker_in_flight")),
        chart("Version by worker", "none", by_worker("worker_version")),
        chart("Sampled tokens/s by engine", "none", by_worker("worker_tokens_per_s")),
        chart("KV cache by engine", "percentunit", by_worker("worker_kv_usage")),
        chart("Decoded responses by engine", "none", by_worker("worker_running")),
        chart("Queue by engine", "none", by_worker("worker_queue")),
        chart("Response length", "none", gauge("response_length")),
        chart("Cut responses", "percentunit", gauge("truncated_fraction")),
        chart("Groups in the buffer", "none", gauge("queue_ready", "ready"), gauge("queue_taken", "taken")),
        chart("Bytes in the buffer", "bytes", gauge("queue_bytes")),
        chart("Seconds of a push", "s", gauge("push_seconds")),
        chart("Bytes of a push to each engine", "bytes", gauge("push_bytes")),
    ),
    "learner": (
        chart("Loss", "none", gauge("loss")),
        chart("Gradient norm", "none", gauge("grad_norm")),
        chart("Entropy", "none", gauge("entropy")),
        chart("KL to the reference", "none", gauge("kl")),
        chart("Clipped tokens", "percentunit", gauge("clip_fraction")),
        chart("Learning rate", "none", gauge("learning_rate")),
        chart("Log-prob gap", "none", gauge("logprob_gap_mean", "mean"), gauge("logprob_gap_max", "max")),
        chart("Canary", "none", gauge("canary")),
        chart("Tokens by age", "none", gauge("staleness_tokens", "{{lag}} versions", by="run, lag")),
    ),
    "workers": (
        chart("Busy threads", "percentunit", by_worker("worker_busy_share")),
        chart("Host memory", "bytes", by_worker("worker_rss_bytes")),
        chart("Busy GPUs", "percentunit", by_worker("worker_gpu_busy_share")),
        chart("GPU memory", "bytes", by_worker("worker_gpu_bytes")),
        chart("Object store", "bytes", gauge("object_store_bytes"), gauge("object_store_size_bytes", "{{run}} of")),
        chart("Lag of the driver's event loop", "s", gauge("loop_lag_s")),
    ),
    "rewards": (
        chart("Reward", "none", *(gauge(f"reward_{part}", part) for part in ("mean", "min", "max", "std"))),
        chart("Components", "none", gauge("reward_component", "{{component}}", by="run, component")),
        chart("Groups without a difference", "percentunit", gauge("uniform_fraction")),
        chart("Responses that could not be scored", "none", growth("reward_failures")),
    ),
    "faults": (
        chart("Restarts", "none", growth("restarts")),
        chart("Restarts by worker", "none", by_worker("worker_restarts")),
        chart("Prompts sent out again", "none", growth("rollout_retries")),
        chart("Resumed prompts and tokens", "none", growth("resumed")),
        chart("Rejected groups", "none", growth("rejected")),
        chart("Regenerated from the journal", "none", growth("recovered")),
        chart("Over-age tokens", "none", gauge("over_age_tokens")),
    ),
}
