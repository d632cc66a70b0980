"""The command `mobula lmms-eval`: its options, and its table."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mobula.deploy.cli.errors import explained
from mobula.deploy.host.terminal import terminal

CACHE = Path("data/lmms-eval")
OUTPUT = Path("runs/lmms-eval")
DAY_S = 86400.0

Endpoint = Annotated[
    str | None, typer.Option(metavar="URL", help="Ask this OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1.")
]
ModelType = Annotated[
    str | None, typer.Option(help="The harness's model name, if config.json does not tell, e.g. qwen2_5_vl.")
]
ModelArgs = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="More for the harness's model; may be repeated.")
]
Limit = Annotated[
    float | None, typer.Option(min=0, help="Samples a task at most; below 1 a share of them. Without it, all.")
]
Online = Annotated[
    bool | None, typer.Option("--online/--offline", help="Use the hub or not; a local folder's default is not.")
]
HarnessOptions = Annotated[
    list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="For the harness as is, e.g. --force_simple.")
]


def lmms_eval(
    model: Annotated[str, typer.Option(help="A checkpoint's folder, a hub name, or the name an endpoint serves.")],
    tasks: Annotated[str, typer.Option(help="The harness's task or group names, comma-separated.")],
    endpoint: Endpoint = None,
    key_env: Annotated[str | None, typer.Option(help="Environment variable with the endpoint's key.")] = None,
    model_type: ModelType = None,
    model_args: ModelArgs = None,
    include_path: Annotated[Path | None, typer.Option(help="A folder with task YAMLs of your own.")] = None,
    limit: Limit = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples at a time; at an endpoint, requests in flight.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, or cuda for all GPUs, or what is here.")] = None,
    output: Annotated[Path, typer.Option(help="Each run gets a dated folder in this one.")] = OUTPUT,
    cache: Annotated[Path, typer.Option(help="Hugging Face's caches for the harness: models, datasets.")] = CACHE,
    online: Online = None,
    environment: Annotated[Path | None, typer.Option(help="The harness's, if not `make harness`'s.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for the whole run; then it is killed.")] = DAY_S,
    harness_options: HarnessOptions = None,
) -> None:
    """Evaluate a model with the public harness lmms-eval, in its own environment (`make harness`)."""
    console = terminal(soft_wrap=True)
    with explained("what was scored until now is in the run's log alone; run it again"):
        from mobula.deploy.checks import lmms_eval as harness
        from mobula.deploy.host.machine import this_machine

        options = harness.LmmsEval(
            model=model,
            model_type=model_type,
            endpoint=endpoint,
            key_env=key_env,
            tasks=tasks,
            include_path=include_path,
            limit=limit,
            batch_size=batch_size,
            device=device or ("cuda" if this_machine().num_gpus else "cpu"),
            model_args=tuple(model_args or ()),
            harness_options=tuple(harness_options or ()),
            output=output,
            cache=cache,
            is_online=online,
            environment=environment or harness.ENVIRONMENT,
            timeout_s=timeout,
        )
        with _stopped_by_sigterm():
            path, artifact = harness.evaluate(options, lambda line: console.print(line, markup=False, highlight=False))
    terminal().print(_table(artifact))
    console.print(
        f"mean score {_figure(artifact['mean_primary_score'], 4)}, {artifact['num_samples']} samples in "
        f"{artifact['seconds']:.1f} s",
        markup=False,
        highlight=False,
    )
    console.print(f"written: {path}", markup=False, highlight=False)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an interrupt, so that the harness ends with this process."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _table(artifact: Mapping[str, Any]) -> Table:
    table = Table(title=f"lmms-eval {artifact['versions']['lmms-eval']}: {artifact['model']}")
    for name in ("task", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("score", "stderr", "samples", "empty", "tokens"):  # answers without a character; tokens an answer
        table.add_column(name, justify="right")
    for task in artifact["tasks"]:
        metric = task["primary_metric"]
        table.add_row(
            task["task"],
            metric or "-",
            _figure(task["primary_score"], 4),
            _figure(task["stderr"].get(_stderr_name(metric or "")), 4),
            str(task["num_samples"]),
            str(task["num_empty_answers"]),
            _figure(task["mean_output_tokens"], 1),
        )
    return table


def _stderr_name(metric: str) -> str:
    """Returns the harness's name for the standard error of `NAME` or `NAME,FILTER`."""
    name, comma, filtered = metric.partition(",")
    return f"{name}_stderr{comma}{filtered}"


def _figure(value: float | None, num_digits: int) -> str:
    return "-" if value is None else f"{value:.{num_digits}f}"
