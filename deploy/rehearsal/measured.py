"""Measured speeds: fits the speeds of a rehearsal to the metrics of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow.parquet as pq

from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE, read_run_folder
from mobula.cluster.metrics.step_records import StepRecord
from mobula.configs.load import load_resolved
from mobula.configs.schema import RunConfig
from mobula.deploy.rehearsal.speeds import Speeds
from mobula.deploy.wiring.persistence import TRAJECTORIES_FOLDER

WARM_UP_STEPS = 2  # the first steps of a run compile and fill caches
START_S = 30.0
LENGTH = "response_num_tokens"  # column of the trajectory log


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: its configuration, and the medians of its steps."""

    config: RunConfig
    seconds: dict[str, float]  # phase -> median of a step
    push_s: float  # median, until every engine serves the version
    num_responses: float  # of a step
    mean_length: float  # tokens of a response

    @classmethod
    def read(cls, folder: Path) -> MeasuredRun:
        """Reads a run folder."""
        try:
            steps = read_run_folder(folder).steps[WARM_UP_STEPS:]
        except ValueError as error:
            raise PreflightError(f"--measured {folder}: {error}") from error
        if not steps:
            raise PreflightError(f"--measured {folder}: a run of more than {WARM_UP_STEPS} steps is needed")
        return cls.of(load_resolved(folder / CONFIG_FILE), steps)

    @classmethod
    def of(cls, config: RunConfig, steps: Sequence[StepRecord]) -> MeasuredRun:
        phases = dict.fromkeys(name for step in steps for name in step.seconds)
        return cls(
            config=config,
            seconds={name: median(step.seconds.get(name, 0.0) for step in steps) for name in phases},
            push_s=_median(steps, MetricName.PUSH_SECONDS),
            num_responses=_median(steps, "num_samples"),
            mean_length=_median(steps, "response_length"),
        )

    @property
    def settle_s(self) -> float:
        """Seconds of a push after the learner has sent it."""
        return max(0.0, self.push_s - self.seconds["weight_sync"])

    @property
    def decoding_s(self) -> float:
        """Seconds of a synchronous step in which the learner waits and engines decode. They load the push before, while
        the driver ends its step.
        """
        return self.seconds["wait_for_rollouts"] - max(0.0, self.settle_s - self.seconds["other"])

    @property
    def responses_per_engine(self) -> float:
        return self.num_responses / self.config.resources.rollout.num_workers

    @property
    def batch(self) -> float:
        """Responses that one engine decodes at a time."""
        return min(self.responses_per_engine, self.config.sampler.vllm.max_num_seqs or float("inf"))

    @property
    def engine_steps(self) -> float:
        """Steps of one engine for its part of a step."""
        return self.mean_length * self.responses_per_engine / self.batch


def measured_speeds(runs: Sequence[MeasuredRun], prompt_tokens: float) -> Speeds:
    """Fits speeds to finished runs of one model on one machine.

    Engines are fitted to synchronous runs, in which nothing else computes while they do. Two lengths tell the time of a
    token from that of a response, two batch sizes the time of a step from that of a response in it, and two numbers of
    learner ranks the time of the collectives from that of an update; what the runs do not tell apart counts as the time
    of a step.
    """
    calm = [run for run in runs if run.config.algorithm.max_staleness == 0]
    if not calm:
        raise PreflightError(
            "--measured: engines and learner compute at the same time in these runs, so their times cannot be "
            "separated: add a run with algorithm.max_staleness=0"
        )
    waits = [run.decoding_s for run in calm]
    engines = [[run.engine_steps, run.responses_per_engine, run.engine_steps * run.batch] for run in calm]
    step_s, response_s, sequence_s = _fitted(engines, waits)
    updates = [
        [*_sizes(run, "learner", prompt_tokens), float(run.config.resources.learner.num_workers > 1)] for run in calm
    ]
    scored = [_sizes(run, "reference", prompt_tokens) for run in calm]
    token_s, learner_response_s, update_s, exchange_s = _fitted(updates, [run.seconds["update"] for run in calm])
    reference_s, reference_response_s, call_s = _fitted(scored, [run.seconds["reference"] for run in calm])
    return Speeds(
        decode_step_s=step_s,
        decode_sequence_s=sequence_s,
        prefill_tokens_per_s=float("inf"),
        engine_response_s=response_s,
        learner_tokens_per_s=1 / token_s if token_s else float("inf"),
        learner_response_s=learner_response_s,
        update_s=update_s,
        exchange_s=exchange_s,
        reference_tokens_per_s=1 / reference_s if reference_s else float("inf"),
        reference_response_s=reference_response_s,
        reference_s=call_s,
        push_s=median(run.seconds["weight_sync"] for run in calm),
        settle_s=median(run.settle_s for run in calm),
        step_s=median(run.seconds["other"] for run in calm),
        start_s=START_S,
    )


def _sizes(run: MeasuredRun, role: str, prompt_tokens: float) -> list[float]:
    """Tokens of the rows of a worker of a role, sampled tokens among them, and calls, of a step."""
    responses = run.num_responses / max(1, run.config.resources.roles[role].num_workers)
    return [responses * (run.mean_length + prompt_tokens), responses * run.mean_length, 1.0]


def recorded_lengths(folder: Path) -> list[int]:
    """Response lengths of a run: of its trajectory log, else the mean of each step."""
    files = sorted((folder / TRAJECTORIES_FOLDER).glob("step-*.parquet"))
    if files:
        return [n for file in files for n in pq.read_table(file, columns=[LENGTH])[LENGTH].to_pylist()]
    try:
        steps = read_run_folder(folder).steps
    except ValueError as error:
        raise PreflightError(f"--lengths-of {folder}: {error}") from error
    if not steps:
        raise PreflightError(f"--lengths-of {folder}: the run has no finished step")
    return [round(step.values["response_length"]) for step in steps]


def _median(steps: Sequence[StepRecord], name: str) -> float:
    return median(step.values[name] for step in steps if name in step.values)


def _fitted(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares of `values` with coefficients that are not negative.

    Every set of at most as many unknowns as rows is solved; a later unknown is used only if it lowers the error.
    """
    matrix, target = np.array(rows, dtype=float), np.array(values, dtype=float)
    num_unknowns = matrix.shape[1]
    best, least = [0.0] * num_unknowns, float(np.square(target).sum())
    for size in range(1, min(num_unknowns, np.linalg.matrix_rank(matrix)) + 1):
        for chosen in combinations(range(num_unknowns), size):
            found, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)
            error = float(np.square(matrix[:, chosen] @ found - target).sum())
            if (found >= 0).all() and error < 0.99 * least - 1e-12:
                best = [0.0] * num_unknowns
                for index, value in zip(chosen, found.tolist(), strict=True):
                    best[index] = value
                least = error
    return best
