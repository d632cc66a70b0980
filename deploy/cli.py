"""The `mobula` command: train, evaluate, replay, plan, show-config, init-model, doctor.

Backends are imported inside the commands that use them, so that `--help` and `show-config` answer at once.
Exit codes: 0 done, 1 the run failed, 2 the user has something to mend (one message on stderr, no traceback), 130 it
was told to stop.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.errors import MobulaError, PreflightError
from configs.load import ConfigError, dump_config, load_config, load_resolved

if TYPE_CHECKING:
    from cluster.placement import NodeResources, PlanRow
    from configs.schema import RunConfig

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130
KNOCK_TIMEOUT_S = 5

app = typer.Typer(
    help="RL post-training of vision-language and visual generative models on a Ray actor/learner cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Groups and keys in any order, e.g. experiment=digits resources=laptop algorithm.kl.coef=0.01",
    ),
]


class TinyModel(StrEnum):
    """Models that `init-model` writes."""

    QWEN2_5_VL = "tiny-qwen2.5-vl"


def main() -> None:
    """Entry point of the `mobula` script."""
    app()


@app.command()
def train(overrides: Overrides = None) -> None:
    """Train: warm start, evaluation, RL, evaluation, report."""
    with _explained():
        config = load_config(overrides or [])
        from deploy import runtime

        raise typer.Exit(runtime.train(config))


@app.command()
def evaluate(overrides: Overrides = None) -> None:
    """Score a policy on the held-out split."""
    with _explained():
        config = load_config(overrides or [])
        from deploy import runtime

        raise typer.Exit(runtime.evaluate(config))


@app.command()
def replay(
    run_folder: Annotated[Path, typer.Argument(help="The folder of a run that had replay.trajectory_log=true.")],
    overrides: Overrides = None,
    score: Annotated[
        bool, typer.Option("--score", help="Score the recorded responses again instead, and show what differs.")
    ] = False,
) -> None:
    """Train a learner on a run's recorded steps, without rollouts; single keys may be set otherwise."""
    from cluster.metrics.run_folder import CONFIG_FILE

    with _explained():
        config = load_resolved(run_folder / CONFIG_FILE, overrides or [])
        from deploy import replay as replaying

        raise typer.Exit((replaying.score if score else replaying.replay)(run_folder, config))


@app.command()
def plan(
    overrides: Overrides = None,
    address: Annotated[
        str | None, typer.Option(help="Plan for this Ray cluster (HOST:PORT, or auto), not for this machine.")
    ] = None,
) -> None:
    """Show which worker would run where, and whether it fits."""
    from cluster.placement import needed_roles, plan_placement, plan_table

    with _explained():
        config = load_config(overrides or [])
        nodes = _nodes(config, address)
        placement = plan_placement(config.resources, nodes, needed_roles(config))
    place = f"the cluster at {address}" if address else "this machine"
    console = Console()
    console.print(_plan_table(plan_table(placement), title=f"resources={config.resources.preset}"))
    console.print(f"{len(placement.workers)} workers fit {place}.")


@app.command()
def show_config(overrides: Overrides = None) -> None:
    """Print the whole configuration as YAML, every group and override resolved."""
    with _explained():
        config = load_config(overrides or [])
    Console(soft_wrap=True).print(dump_config(config), markup=False, highlight=False, end="")


@app.command()
def init_model(
    model: Annotated[TinyModel, typer.Argument(help="The model to write.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write it to; it must not hold anything else.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    tied: Annotated[bool, typer.Option("--tied/--untied", help="Tie output and input embeddings.")] = False,
) -> None:
    """Write a small random-weight model in the Hugging Face layout."""
    with _explained():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there and not an empty folder: give another folder, or remove it first")
        from learner.policies.tiny import write_tiny_qwen2_5_vl

        try:
            written = write_tiny_qwen2_5_vl(folder, seed=seed, tie_word_embeddings=tied)
        except OSError as error:
            raise PreflightError(f"{folder} cannot be written ({error.strerror}): give another folder") from error
    message = f"{model.value} written to {written}: use it with policy.model={written}"
    Console(soft_wrap=True).print(message, markup=False)


@app.command()
def doctor(overrides: Overrides = None) -> None:
    """Check that this machine can run a configuration; exits with 1 if something that it needs is missing."""
    from deploy.doctor import Verdict, examine

    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.MISSING: "red"}
    console = Console(soft_wrap=True)
    num_missing = 0
    with _explained():
        for finding in examine(load_config(overrides or [])):
            num_missing += finding.verdict is Verdict.MISSING
            console.print(f"{finding.verdict:>8}", style=colours[finding.verdict], end="  ")
            console.print(f"{finding.name}: {finding.detail}", markup=False, highlight=False)
            if finding.action:
                console.print(f"          -> {finding.action}", markup=False, highlight=False)
    if num_missing:
        raise typer.Exit(FAILED)


@contextmanager
def _explained() -> Iterator[None]:
    """What was raised on purpose becomes one message on stderr and an exit code; anything else is a bug and travels."""
    try:
        yield
    except (ConfigError, PreflightError) as error:
        _complain(error)
        raise typer.Exit(USER_ERROR) from error
    except MobulaError as error:
        _complain(error)
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt as error:
        _complain("interrupted: the same command with resume=auto goes on from the last checkpoint")
        raise typer.Exit(INTERRUPTED) from error


def _complain(message: object) -> None:
    console = Console(stderr=True, soft_wrap=True)
    console.print("mobula:", style="bold red", end=" ")
    console.print(str(message), markup=False, highlight=False)


def _nodes(config: RunConfig, address: str | None) -> tuple[NodeResources, ...]:
    """What there is to plan for: this machine alone, or the running cluster at `address`."""
    if address is None:
        from deploy.machine import as_node, this_machine

        return (as_node(this_machine(), config.resources),)
    import ray

    from cluster.placement_groups import cluster_nodes

    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False)
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"no Ray cluster answers at {address} ({error}): give --address HOST:PORT of one that runs, or leave it out"
        ) from error
    try:
        return cluster_nodes()
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Fail at once where nothing listens; Ray itself would try for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()


def _plan_table(rows: list[PlanRow], title: str) -> Table:
    table = Table("role", "node", "workers", "CPUs", "GPUs", "threads each", "cores", title=title)
    for row in rows:
        cores = " | ".join(",".join(str(core) for core in worker) for worker in row.cores if worker)
        table.add_row(
            row.role,
            row.node_id,
            str(row.num_workers),
            f"{row.num_cpus:g}",
            f"{row.num_gpus:g}",
            str(row.num_threads),
            cores or "not bound",
        )
    return table


if __name__ == "__main__":
    main()
