"""The page of `mobula rehearse`: timeline, utilisation, staleness, memory, driver load and limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from mobula.cluster.metrics.step_records import strict
from mobula.cluster.runtime.placement import needed_roles
from mobula.deploy.planning.fit import GIB, MemoryPlan
from mobula.deploy.planning.plan_command import demand_table
from mobula.deploy.rehearsal.play import Played
from mobula.deploy.rehearsal.stage import Gain, RehearsalStage, Result, Size, Sweep, quantiles

BAR = 40  # characters of a whole step
MIN_GAIN = 0.02


def show(
    console: Console,
    stage: RehearsalStage,
    played: Played,
    result: Result,
    memory: MemoryPlan | None,
    found: Sequence[Gain],
    sweep: Sweep,
    source: str,
) -> None:
    """Prints the page, 80 characters wide."""
    for line in _headline(stage, source):
        console.print(line, highlight=False)
    console.print(_step_table(result))
    console.print(_role_table(stage, result))
    staleness = ", ".join(f"{lag}: {share:.0%}" for lag, share in result.staleness.items())
    console.print(f"staleness of trained tokens, in versions: {staleness}", highlight=False)
    if memory is not None:
        console.print(demand_table(memory.demands))
        for demand in memory.shortfalls:
            text = f"{demand.node_id}, {demand.place}: {demand.shortfall / GIB:.1f} GiB short"
            console.print(text, style="red", highlight=False)
    for line in _loads(stage, result):
        console.print(line, highlight=False)
    for event in played.events:
        console.print(f"event, {event}", highlight=False)
    for gain in found:
        if gain.gain >= MIN_GAIN:
            console.print(f"{gain.role} at twice the speed: {gain.gain:+.0%} steps/h", highlight=False)
    if found and found[0].gain < MIN_GAIN:
        console.print("no role at twice the speed gives more than 2 % steps/h", highlight=False)
    if sweep.sizes:
        console.print(_size_table(sweep.sizes))
        console.print(_first_limit(sweep.sizes), highlight=False)
    if sweep.ended:
        console.print(sweep.ended, highlight=False)
    console.print(
        f"{len(played.steps)} steps: {played.virtual_s:.0f} s in virtual time, {played.wall_s:.1f} s here "
        f"({played.driver_s:.1f} CPU s driver, {played.simulation_s:.1f} CPU s simulation)",
        highlight=False,
    )


def as_json(
    stage: RehearsalStage,
    played: Played,
    result: Result,
    memory: MemoryPlan | None,
    found: Sequence[Gain],
    sweep: Sweep,
    source: str,
) -> dict[str, Any]:
    """The page as values for JSON."""
    demands = [] if memory is None else [{**asdict(demand), "shortfall": demand.shortfall} for demand in memory.demands]
    rows = {
        "speeds": {"source": source, **asdict(stage.speeds)},
        "steps_per_hour": 3600 / result.step_s,
        "wait_share": result.wait_share,
        "driver_share": result.driver.share,
        "result": asdict(result),
        "played": asdict(played),
        "memory": demands,
        "gains": [asdict(gain) for gain in found],
        "sizes": [asdict(size) for size in sweep.sizes],
        "sizes_ended": sweep.ended,
    }
    page: dict[str, Any] = strict(_plain(rows))
    return page


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


def _role_table(stage: RehearsalStage, result: Result) -> Table:
    table = Table("role", "workers", "busy", title="utilisation")
    for role, share in result.utilisation.items():
        table.add_row(role, str(_workers(stage).get(role, 0)), f"{share:.0%}")
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


def _first_limit(larger: Sequence[Size]) -> str:
    first = next((size for size in larger if size.broken), None)
    if first is None:
        last = larger[-1]
        return f"nothing breaks up to {last.num_engines} engines and {last.num_ranks} ranks"
    return f"first limit, at {first.num_engines} engines and {first.num_ranks} ranks: {'; '.join(first.broken)}"
