"""`mobula rehearse`: plays a configuration on this machine and shows what its cluster would do."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import yaml
from rich.console import Console

from mobula.cluster.errors import PreflightError
from mobula.configs.load import load_config
from mobula.configs.overrides import MISSING
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import PlannedNode, described_nodes, read_cluster, this_node
from mobula.deploy.planning.memory import RELEASED_MODELS as MODELS
from mobula.deploy.planning.memory import policy_shape
from mobula.deploy.rehearsal.measured import MeasuredRun, measured_speeds, recorded_lengths
from mobula.deploy.rehearsal.options import RehearseCommand
from mobula.deploy.rehearsal.page import as_json, show
from mobula.deploy.rehearsal.prompts import StatedPrompts, prepared_run, shrunk, stated_run
from mobula.deploy.rehearsal.roofline import estimated_speeds, gpu_of_memory
from mobula.deploy.rehearsal.simulated.machine import LognormalLengths, RecordedLengths, ResponseLengths, read_faults
from mobula.deploy.rehearsal.speeds import Speeds
from mobula.deploy.rehearsal.stage import RehearsalStage, gains, result_of, swept
from mobula.deploy.wiring.preparation import Prepared
from mobula.learner.policies.shapes import ModelShape, shape_of_values

MEASURED_PROMPTS = 32  # prompts whose mean length is that of a measured run
GPUS_OF_NODE = 8
GPU_MEMORY = "80GB"
UNKNOWN_PATH = "nowhere"  # of data that are stated


def rehearse(command: RehearseCommand, console: Console) -> None:
    """Plays the configuration and prints the page."""
    faults = read_faults(command.faults, command.fault_file)
    with staged(command) as (stage, source), _quiet():
        memory = stage.memory()
        played = stage.play(faults=faults)
        if not played.steps:
            raise PreflightError(f"the rehearsal ended before its first step: {played.error}")
        result = result_of(stage, played)
        found = gains(stage, result) if command.with_gains else []
        sweep = swept(stage, command.factors, command.size_s)
    show(console, stage, played, result, memory, found, sweep, source)
    if command.json_file is not None:
        page = as_json(stage, played, result, memory, found, sweep, source)
        command.json_file.write_text(json.dumps(page, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def staged(command: RehearseCommand) -> Iterator[tuple[RehearsalStage, str]]:
    """Everything that the rehearsal needs, and where its speeds come from. Files of the model are removed on exit."""
    with TemporaryDirectory(prefix="mobula-rehearsal-") as folder:
        config = load_config([*command.overrides, f"num_steps={command.num_steps}"], is_complete=False)
        shape = _shape(config, command.model)
        nodes = _nodes(config, command)
        small = shrunk(config, shape.model_type, Path(folder) / "model")
        prepared = _prepared(small, shape, command)
        speeds, source = _speeds(prepared, shape, nodes, command)
        yield RehearsalStage(prepared, shape, nodes, speeds, _lengths(config, command)), source


def _shape(config: RunConfig, model: str | None) -> ModelShape:
    if model is not None:
        known = yaml.safe_load(MODELS.read_text(encoding="utf-8"))
        if model not in known:
            raise PreflightError(f"--model {model} is unknown: choose {', '.join(known)}, or set policy.model")
        return shape_of_values(known[model])
    shape = policy_shape(config)
    if shape is None:
        raise PreflightError("a rehearsal needs the sizes of a model: set policy.model, or give --model")
    return shape


def _nodes(config: RunConfig, command: RehearseCommand) -> tuple[PlannedNode, ...]:
    if command.cluster is not None:
        return read_cluster(command.cluster)
    if command.nodes is not None:
        return described_nodes(command.nodes)
    if config.resources.device == "cpu":
        return (this_node(config.resources),)
    num_gpus = sum(role.num_workers * role.num_gpus for role in config.resources.roles.values())
    num_nodes = max(config.resources.num_nodes, math.ceil(num_gpus / GPUS_OF_NODE))
    return described_nodes(f"{num_nodes}x{GPUS_OF_NODE}x{GPU_MEMORY}")


def _prepared(config: RunConfig, shape: ModelShape, command: RehearseCommand) -> Prepared:
    if command.prompt_tokens is not None:
        stated = StatedPrompts(command.prompt_tokens, command.media_tokens, command.media_bytes)
        data = config.data.model_copy(update={"path": Path(UNKNOWN_PATH)})
        return stated_run(config.model_copy(update={"data": data}), shape, stated)
    if str(config.data.path) == MISSING:
        raise PreflightError("prompts come from the run's data: set data.path, or state --prompt-tokens")
    return prepared_run(config, shape)


def _speeds(
    prepared: Prepared, shape: ModelShape, nodes: Sequence[PlannedNode], command: RehearseCommand
) -> tuple[Speeds, str]:
    """The speeds, and where they come from."""
    config = prepared.config
    if command.measured:
        runs = [MeasuredRun.read(folder) for folder in command.measured]
        speeds = measured_speeds(runs, mean_prompt_tokens(prepared))
        source = f"fitted to {', '.join(folder.name for folder in command.measured)}"
    elif config.resources.device == "cuda":
        gpu = command.gpu or gpu_of_memory(nodes[0].gpu_bytes or 0)
        speeds, source = estimated_speeds(config, shape, gpu), f"estimated from the peak rates of {gpu}"
    elif command.speeds is not None or command.words:
        speeds, source = (
            Speeds(decode_step_s=0.02, decode_sequence_s=0, prefill_tokens_per_s=1e4, learner_tokens_per_s=1e3),
            "stated",
        )
    else:
        raise PreflightError(
            "speeds on CPU are not estimated: give --measured RUN, --speeds FILE or --speed KEY=NUMBER"
        )
    if command.speeds is not None:
        speeds, source = speeds.with_file(command.speeds), f"{source}; {command.speeds}"
    if command.words:
        speeds, source = speeds.with_words(command.words), f"{source}; {', '.join(command.words)}"
    return speeds, source


def mean_prompt_tokens(prepared: Prepared) -> float:
    """Of the first held-out prompts."""
    prompts = prepared.fixed_prompts(prepared.config.evaluation.split, MEASURED_PROMPTS).prompts
    return fmean(prompt.num_tokens for prompt in prompts)


def _lengths(config: RunConfig, command: RehearseCommand) -> ResponseLengths:
    limit = config.sampler.max_tokens
    if command.lengths_of is not None:
        return RecordedLengths(recorded_lengths(command.lengths_of), limit, config.seed)
    mean = command.mean_tokens or limit / 2
    return LognormalLengths(mean / math.exp(command.sigma**2 / 2), command.sigma, limit, config.seed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the log lines of simulated workers below errors."""
    logger = logging.getLogger("mobula")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
