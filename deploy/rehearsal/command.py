"""`mobula rehearse`: plays a configuration on this machine and shows what its cluster would do."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.step_records import strict
from mobula.cluster.runtime.placement import needed_roles
from mobula.configs.load import CONFIG_FILE, load_config, load_resolved
from mobula.configs.overrides import MISSING
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import PlannedNode, described_nodes, read_cluster, this_node
from mobula.deploy.planning.memory import RELEASED_MODELS as MODELS
from mobula.deploy.planning.memory import policy_shape
from mobula.deploy.planning.plan_command import GIB, MemoryPlan, demand_table
from mobula.deploy.rehearsal.options import RehearseCommand
from mobula.deploy.rehearsal.play import Played
from mobula.deploy.rehearsal.simulated.machine import LognormalLengths, RecordedLengths, ResponseLengths, read_faults
from mobula.deploy.rehearsal.speeds import (
    MeasuredRun,
    Speeds,
    estimated_speeds,
    gpu_of_memory,
    measured_speeds,
    recorded_lengths,
)
from mobula.deploy.rehearsal.stage import (
    Gain,
    RehearsalStage,
    Result,
    Size,
    StatedProcessor,
    Sweep,
    gains,
    prepared_run,
    quantiles,
    result_of,
    shrunk,
    stated_run,
    swept,
)
from mobula.deploy.run.run_client import named_folder
from mobula.deploy.wiring.preparation import Prepared
from mobula.learner.policies.shapes import ModelShape, shape_of_values

BAR = 40  # characters of a whole step
MIN_GAIN = 0.02


@dataclass(frozen=True)
class Rehearsal:
    stage: RehearsalStage
    source: str  # of its speeds
    memory: MemoryPlan
    played: Played
    result: Result
    gains: Sequence[Gain]
    sweep: Sweep


def show(console: Console, page: Rehearsal) -> None:
    stage, played, result, sweep = page.stage, page.played, page.result, page.sweep
    for line in _headline(stage, page.source):
        console.print(line)
    console.print(_step_table(result))
    table, num_workers = Table("role", "workers", "busy", title="utilisation"), _workers(stage)
    for role, busy in result.utilisation.items():
        table.add_row(role, str(num_workers.get(role, 0)), f"{busy:.0%}")
    console.print(table)
    staleness = ", ".join(f"{lag}: {share:.0%}" for lag, share in result.staleness.items())
    console.print(f"staleness of trained tokens, in versions: {staleness}")
    console.print(demand_table(page.memory.demands))
    for demand in page.memory.shortfalls:
        text = f"{demand.node_id}, {demand.place}: {demand.shortfall / GIB:.1f} GiB short"
        console.print(text, style="red")
    for line in _loads(stage, result):
        console.print(line)
    for event in played.events:
        console.print(f"event, {event}")
    for gain in page.gains:
        if gain.gain >= MIN_GAIN:
            console.print(f"{gain.role} at twice the speed: {gain.gain:+.0%} steps/h")
    if page.gains and page.gains[0].gain < MIN_GAIN:
        console.print("no role at twice the speed gives more than 2 % steps/h")
    if sweep.sizes:
        console.print(_size_table(sweep.sizes))
        first, last = next((size for size in sweep.sizes if size.broken), None), sweep.sizes[-1]
        if first is None:
            console.print(f"nothing breaks up to {last.num_engines} engines and {last.num_ranks} ranks")
        else:
            where = f"{first.num_engines} engines and {first.num_ranks} ranks"
            console.print(f"first limit, at {where}: {'; '.join(first.broken)}")
    if sweep.ended:
        console.print(sweep.ended)
    console.print(
        f"{len(played.steps)} steps: {played.virtual_s:.0f} s in virtual time, {played.wall_s:.1f} s here "
        f"({played.driver_s:.1f} CPU s driver, {played.simulation_s:.1f} CPU s simulation)"
    )


def as_json(page: Rehearsal) -> dict[str, Any]:
    stage, result, sweep = page.stage, page.result, page.sweep
    demands = [{**asdict(demand), "shortfall": demand.shortfall} for demand in page.memory.demands]
    rows = {
        "speeds": {"source": page.source, **asdict(stage.speeds)},
        "steps_per_hour": 3600 / result.step_s,
        "wait_share": result.wait_share,
        "driver_share": result.driver.share,
        "result": asdict(result),
        "played": asdict(page.played),
        "memory": demands,
        "gains": [asdict(gain) for gain in page.gains],
        "sizes": [asdict(size) for size in sweep.sizes],
        "sizes_ended": sweep.ended,
    }
    return _plain(rows)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return strict(value)


def _headline(stage: RehearsalStage, source: str) -> Iterator[str]:
    config, algorithm = stage.config, stage.config.algorithm
    roles = ", ".join(f"{n} {role}" for role, n in _workers(stage).items())
    lengths = quantiles(stage.lengths)
    yield f"rehearsal of resources={config.resources.preset} on {len(stage.nodes)} nodes: {roles}"
    yield (
        f"{stage.shape.model_type}, {stage.shape.num_parameters / 1e9:.1f} B parameters; a step has "
        f"{algorithm.prompts_per_step} prompts x {algorithm.samples_per_prompt}, max_staleness="
        f"{algorithm.max_staleness}"
    )
    yield f"responses: mean {lengths['mean']:.0f}, median {lengths['p50']:.0f}, 99 % below {lengths['p99']:.0f} tokens"
    yield f"speeds: {source}"


def _workers(stage: RehearsalStage) -> dict[str, int]:
    roles = stage.config.resources.roles
    return {role: roles[role].num_workers for role in needed_roles(stage.config)}


def _step_table(result: Result) -> Table:
    table = Table("phase", "s", "share", "", title=f"a step: {result.step_s:.2f} s, {3600 / result.step_s:.1f} steps/h")
    start = 0.0
    for phase, seconds in result.phases.items():
        if seconds < 0.001 * result.step_s:
            continue
        first, last = (round(BAR * at / result.step_s) for at in (start, start + seconds))
        start += seconds
        bar = " " * first + "#" * max(1, last - first)
        table.add_row(phase, f"{seconds:.2f}", f"{seconds / result.step_s:.0%}", bar)
    return table


def _loads(stage: RehearsalStage, result: Result) -> Iterator[str]:
    driver = result.driver
    yield (
        f"driver: {driver.measured_s:.3f} CPU s a step here, {driver.ray_s:.3f} s more for Ray: {driver.share:.1%} of "
        "a core"
    )
    capacity = stage.config.resources.object_store_bytes / 1e9
    yield (
        f"object store: at most {result.store_share:.1%} of {capacity:.1f} GB, on {result.store_node or 'no node'} "
        "(groups and media that are referred to)"
    )


def _size_table(larger: Sequence[Size]) -> Table:
    table = Table("size", "engines", "ranks", "step s", "driver", "store", "shares s", "limits", title="larger sizes")
    for size in larger:
        result = size.result
        table.add_row(
            f"x{size.factor}",
            str(size.num_engines),
            str(size.num_ranks),
            f"{result.step_s:.1f}",
            f"{result.driver.share:.0%}",
            f"{result.store_share:.0%}",
            f"{size.planning_s:.2f}",
            "; ".join(size.broken),
        )
    return table


MEASURED_PROMPTS = 32  # prompts whose mean length is that of a measured run
GPUS_OF_NODE = 8
GPU_MEMORY = "80GB"
UNKNOWN_PATH = "nowhere"  # of data that are stated


def rehearse(command: RehearseCommand, console: Console) -> None:
    command = _with_run(command)
    faults = read_faults(command.faults, command.fault_file)
    with staged(command) as (stage, source), _quiet():
        memory = stage.memory()
        played = stage.play(faults=faults)
        if not played.steps:
            raise PreflightError(f"the rehearsal ended before its first step: {played.error}")
        result = result_of(stage, played)
        found = gains(stage, result) if command.with_gains else []
        page = Rehearsal(stage, source, memory, played, result, found, swept(stage, command.factors, command.size_s))
    show(console, page)
    if command.json_file is not None:
        text = json.dumps(as_json(page), indent=1, allow_nan=False)
        command.json_file.write_text(text + "\n", encoding="utf-8")


def _with_run(command: RehearseCommand) -> RehearseCommand:
    """Replaces the run that the command names by its folder, whose speeds it takes if no others are given."""
    if command.run is None:
        return command
    run = named_folder(command.run)
    is_timed = command.measured or command.speeds or command.words or command.gpu
    return replace(command, run=run, measured=command.measured if is_timed else [run])


@contextmanager
def staged(command: RehearseCommand) -> Iterator[tuple[RehearsalStage, str]]:
    """Everything that the rehearsal needs, and where its speeds come from. Files of the model are removed on exit."""
    with TemporaryDirectory(prefix="mobula-rehearsal-") as folder:
        words = [*command.overrides, f"num_steps={command.num_steps}"]
        if command.run is None:
            config = load_config(words, is_complete=False)
        else:
            config = load_resolved(command.run / CONFIG_FILE, words)
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
    if not isinstance(shape, ModelShape):
        raise PreflightError(
            "a rehearsal needs the sizes of a language model: set policy.model to one, or give --model"
        )
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
        stated = StatedProcessor(command.prompt_tokens, command.media_tokens, command.media_bytes)
        data = config.data.model_copy(update={"path": Path(UNKNOWN_PATH)})
        return stated_run(config.model_copy(update={"data": data}), shape, stated)
    if str(config.data.path) == MISSING:
        raise PreflightError("prompts come from the run's data: set data.path, or state --prompt-tokens")
    return prepared_run(config, shape)


def _speeds(
    prepared: Prepared, shape: ModelShape, nodes: Sequence[PlannedNode], command: RehearseCommand
) -> tuple[Speeds, str]:
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
    logger = logging.getLogger("mobula")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
