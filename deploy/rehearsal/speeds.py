"""Speeds of the roles of a rehearsal: stated, estimated from peak rates, or fitted to finished runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml

from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE, read_run_folder
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.weight_sync.manifest import DTYPE_BYTES
from mobula.configs.load import load_resolved
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.persistence import TRAJECTORIES_FOLDER
from mobula.learner.policies.shapes import ModelShape

HOW = "write KEY=NUMBER, or a YAML file of such entries"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Times of one worker of each role. Every number is in seconds, tokens or bytes per second.

    An engine step takes `decode_step_s + decode_sequence_s * responses` and gives each response of the batch a token.
    """

    decode_step_s: float
    decode_sequence_s: float
    prefill_tokens_per_s: float  # of one engine
    learner_tokens_per_s: float  # of one rank: rows with their prompts, forward and backward
    engine_response_s: float = 0.0  # of one engine, more for each response
    wait_s: float = 0.0  # of each group between engine and driver
    learner_response_s: float = 0.0  # of one rank, more for each sampled token: its logits
    update_s: float = 0.0  # of one step, apart from its tokens
    exchange_s: float = 0.0  # more for each step where there are two or more ranks: their collectives
    reference_tokens_per_s: float = math.inf  # of one scorer
    reference_response_s: float = 0.0  # more for each sampled token
    reference_s: float = 0.0  # of one call
    reward_s: float = 0.0  # of one group, at one worker of a service
    push_s: float = 0.0  # of one push, apart from its bytes
    push_bytes_per_s: float = math.inf  # of one transfer group
    settle_s: float = 0.0  # engines load a push so much longer than the learner sends it
    start_s: float = 60.0  # of a process that loads the model
    storage_bytes_per_s: float = 2e9  # of one learner rank, to and from checkpoints
    step_s: float = 0.0  # of the driver between the phases of a step

    def with_words(self, words: Sequence[str]) -> Speeds:
        """Returns these speeds with some of them stated, as `decode_step_s=0.02`."""
        return replace(self, **_stated(dict(word.partition("=")[::2] for word in words), "--speed"))

    def with_file(self, path: Path) -> Speeds:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise PreflightError(f"--speeds {path} cannot be read ({error}): {HOW}") from error
        if not isinstance(values, Mapping):
            raise PreflightError(f"--speeds {path} holds no entries: {HOW}")
        return replace(self, **_stated(values, f"--speeds {path}"))


def _stated(values: Mapping[str, Any], where: str) -> dict[str, float]:
    known = [f.name for f in fields(Speeds)]
    stated = {}
    for key, value in values.items():
        if key not in known:
            raise PreflightError(f"{where}: {key} is unknown: choose {', '.join(known)}")
        try:
            stated[key] = float(value)
        except (TypeError, ValueError) as error:
            raise PreflightError(f"{where}: {key}={value} is no number: {HOW}") from error
        if not stated[key] >= 0 or (key.endswith("_per_s") and stated[key] == 0):
            raise PreflightError(f"{where}: {key}={value} is out of range: give a positive number")
    return stated


TRAINING_MFU = 0.35  # share of the peak rate that forward and backward reach, with communication
PREFILL_MFU = 0.5
MEMORY_SHARE = 0.6  # share of the memory bandwidth that decoding reaches
STEP_OVERHEAD_S = 0.004  # of an engine step: scheduling, sampling, launches
CALL_S = 0.5  # of an update: collation, the optimizer's step, metrics
NETWORK_SHARE = 0.5  # share of the network's bandwidth that a push reaches
REWARD_S = 0.02
FORWARD, BACKWARD, RECOMPUTED = 2, 4, 2  # floating-point operations per parameter and token


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU as its vendor states them: dense bfloat16, memory, and a share of its node's network."""

    flops: float
    bytes_per_s: float
    network_bytes_per_s: float


GPUS = {
    "A10G": Gpu(70e12, 600e9, 3e9),
    "L40S": Gpu(362e12, 864e9, 6e9),
    "A100": Gpu(312e12, 2039e9, 25e9),
    "H100": Gpu(989e12, 3350e9, 50e9),
    "H200": Gpu(989e12, 4800e9, 50e9),
    "B200": Gpu(2250e12, 8000e9, 50e9),
}

BY_MEMORY = ((30e9, "A10G"), (50e9, "L40S"), (85e9, "H100"), (145e9, "H200"), (float("inf"), "B200"))


def gpu_of_memory(num_bytes: int) -> str:
    """The name of a GPU with so much memory; the A100 of 80 GB has to be named."""
    return next(name for limit, name in BY_MEMORY if num_bytes < limit)


def estimated_speeds(config: RunConfig, shape: ModelShape, gpu: str) -> Speeds:
    """Speeds of the run's model on a GPU.

    Decoding reads all weights and the KV cache of the batch once a step; prefill, training and scoring compute. Every
    parameter counts for every token, so experts are overestimated.
    """
    if gpu not in GPUS:
        raise PreflightError(f"--gpu {gpu} is unknown: choose {', '.join(GPUS)}, or state the speeds")
    peak, width = GPUS[gpu], config.resources.rollout.tensor_parallel
    params, dtype = shape.num_parameters, DTYPE_BYTES[config.resources.dtype]
    length = config.data.max_prompt_tokens / 2 + config.sampler.max_tokens / 2
    cache = (shape.cache.num_full + shape.cache.num_windowed) * shape.cache.width * dtype * length
    reading = MEMORY_SHARE * peak.bytes_per_s * width
    prefill = PREFILL_MFU * peak.flops / (FORWARD * params)
    again = RECOMPUTED if config.learner.activation_checkpointing != "none" else 0
    return Speeds(
        decode_step_s=STEP_OVERHEAD_S + params * dtype / reading,
        decode_sequence_s=cache / reading + FORWARD * params / (PREFILL_MFU * peak.flops * width),
        prefill_tokens_per_s=prefill * width,
        learner_tokens_per_s=TRAINING_MFU * peak.flops / ((FORWARD + BACKWARD + again) * params),
        update_s=CALL_S,
        reference_tokens_per_s=prefill,
        reward_s=REWARD_S,
        push_s=0.2,
        push_bytes_per_s=NETWORK_SHARE * peak.network_bytes_per_s,
        start_s=60.0 + params * dtype / 2e9,
    )


WARM_UP_STEPS = 2  # the first steps of a run compile and fill caches
START_S = 30.0
LENGTH = "response_num_tokens"  # column of the trajectory log


@dataclass(frozen=True)
class MeasuredRun:
    config: RunConfig
    seconds: dict[str, float]  # phase -> median of a step
    push_s: float  # median, until every engine serves the version
    num_responses: float  # of a step
    mean_length: float  # tokens of a response

    @classmethod
    def read(cls, folder: Path) -> MeasuredRun:
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
        the driver ends its step."""
        return self.seconds["wait_for_rollouts"] - max(0.0, self.settle_s - self.seconds["other"])

    @property
    def responses_per_engine(self) -> float:
        return self.num_responses / self.config.resources.rollout.num_workers

    @property
    def batch(self) -> float:
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
