"""Evaluates a checkpoint with the public harness lmms-eval."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from subprocess import TimeoutExpired, run
from typing import Annotated, Any

import typer

from mobula.cluster.errors import DeadlineError, MobulaError, PreflightError
from mobula.cluster.files import write_atomically
from mobula.configs.errors import ConfigError

PRIMARY = ("anls", "relaxed_overall", "acc", "exact_match")  # the first of these that a task has is its headline
UNFILTERED = "none"

# The harness scores these in place of an answer that it did not get, as if the model had said them.
NO_ANSWER = ("[LMMS_EVAL_REQUEST_FAILED", "[LMMS_EVAL_BUDGET_EXCEEDED]")


class HarnessError(MobulaError):
    """The harness failed, or its results are missing or invalid."""


def read_results(folder: Path) -> dict[str, Any]:
    """The newest results below `folder` as entries of the artifact, with figures of the samples beside them.

    Paths are relative to the parent of `folder`. The mean score is None if no task has a score.
    """
    files = sorted(folder.rglob("*_results.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if not files:
        raise HarnessError(f"no *_results.json below {folder}: the harness ended before it scored anything")
    newest = files[-1]
    try:
        whole = json.loads(newest.read_text(encoding="utf-8"))
        rows, members = whole["results"], whole["group_subtasks"]
        harness_seconds = float(whole["total_evaluation_time_seconds"])
    except (ValueError, KeyError, TypeError) as error:
        raise HarnessError(f"{newest} is not what lmms-eval writes ({error}): run it again") from error
    groups = {name: numbers(row) for name, row in rows.items() if members.get(name)}
    tasks = [_task(name, row, newest, folder.parent) for name, row in rows.items() if not members.get(name)]
    if not tasks:
        raise HarnessError(f"{newest} holds no task: name tasks, or groups that have some")
    scores = [task["primary_score"] for task in tasks if task["primary_score"] is not None]
    return {
        "harness_seconds": round(harness_seconds, 3),  # from the load of the model to the last score
        "num_samples": sum(task["num_samples"] for task in tasks),
        "mean_primary_score": sum(scores) / len(scores) if scores else None,
        "tasks": tasks,
        "groups": groups,
        "results_file": str(newest.relative_to(folder.parent)),
    }


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row of the harness's table, by name; what no filter touched goes without ",none"."""
    return {
        key.removesuffix(f",{UNFILTERED}"): float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def primary_metric(metrics: Mapping[str, float]) -> str | None:
    """The metric that stands for a task: the first known one, else the first by name; unfiltered before filtered."""
    for name in PRIMARY:
        same = [key for key in metrics if key.partition(",")[0] == name]
        if same:
            return min(same, key=lambda key: ("," in key, key))
    return min(metrics, key=lambda key: ("," in key, key), default=None)


def _task(name: str, row: Mapping[str, Any], results: Path, root: Path) -> dict[str, Any]:
    """Metrics are by name, `NAME,FILTER` where the harness filtered answers; the primary one is None without any."""
    values = numbers(row)
    stderr = {key: value for key, value in values.items() if "_stderr" in key.partition(",")[0]}
    metrics = {key: value for key, value in values.items() if key not in stderr}
    samples = results.with_name(f"{results.name.removesuffix('_results.json')}_samples_{name}.jsonl")
    primary = primary_metric(metrics)
    return {
        "task": name,
        "primary_metric": primary,
        "primary_score": None if primary is None else metrics[primary],
        "metrics": metrics,
        "stderr": stderr,
        **_samples(name, samples),
        "samples_file": str(samples.relative_to(root)),
    }


def _samples(task: str, path: Path) -> dict[str, int | float | None]:
    num = num_empty = num_failed = 0
    tokens: list[int] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                sample = json.loads(line)
                answers = _texts([sample.get("resps"), sample["filtered_resps"]])
                num += 1
                num_empty += not any(answer.strip() for answer in answers)
                num_failed += any(answer.startswith(NO_ANSWER) for answer in answers)
                tokens += [count["output_tokens"] for count in sample.get("token_counts") or () if count]
    except FileNotFoundError as error:
        raise HarnessError(f"task {task} has a score, and no samples in {path}: see the log beside it") from error
    except (ValueError, KeyError, TypeError) as error:
        raise HarnessError(f"{path}, sample {num + 1}, is not what lmms-eval writes ({error}): run it again") from error
    return {
        "num_samples": num,
        "num_empty_answers": num_empty,
        "num_failed_requests": num_failed,  # whose answers the harness made up because it got none
        "mean_output_tokens": sum(tokens) / len(tokens) if tokens else None,
    }


def _texts(value: object) -> list[str]:
    """Flattens nested lists of texts: the harness unwraps single-element lists differently for each kind of task."""
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


log = logging.getLogger(__name__)
ENVIRONMENT = Path(__file__).parents[2] / ".venv-lmms-eval"
ARTIFACT, LOG, RAW = "lmms-eval.json", "harness.log", "raw"
PACKAGES = ("lmms-eval", "torch", "transformers", "datasets")
NUM_LAST_LINES = 40  # of a log, in an error
VERSIONS_WITHIN_S = 120.0  # to start an interpreter from a cold disk

# The harness's name by the model_type of a checkpoint's config.json, for families whose constructors were read.
FAMILIES = {"qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_5_vl", "qwen3_vl": "qwen3_vl", "qwen3_vl_moe": "qwen3_vl"}
ENDPOINT = "openai"
REASONING_NAMES = ("o1", "o3", "o4", "gpt-5")  # wherever they stand in a name, the harness asks such a model otherwise


@dataclass(frozen=True, kw_only=True)
class LmmsEval:
    """Options of `mobula lmms-eval`."""

    model: Annotated[str, typer.Option(help="A checkpoint's folder, a hub name, or the name an endpoint serves.")]
    tasks: Annotated[str, typer.Option(help="The harness's task or group names, comma-separated.")]
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ask this OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1."),
    ] = None
    key_env: Annotated[str | None, typer.Option(help="Environment variable with the endpoint's key.")] = None
    model_type: Annotated[
        str | None, typer.Option(help="The harness's model name, if config.json does not tell, e.g. qwen2_5_vl.")
    ] = None
    model_args: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="More for the harness's model; may be repeated.")
    ] = field(default_factory=list)
    include_path: Annotated[Path | None, typer.Option(help="A folder with task YAMLs of your own.")] = None
    limit: Annotated[
        float | None, typer.Option(min=0, help="Samples a task at most; below 1 a share of them. Without it, all.")
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Samples at a time; at an endpoint, requests in flight.")] = 1
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, or cuda for all GPUs, or what is here.")] = None
    output: Annotated[Path, typer.Option(help="Each run gets a dated folder in this one.")] = Path("runs/lmms-eval")
    cache: Annotated[Path, typer.Option(help="Hugging Face's caches for the harness: models, datasets.")] = Path(
        "data/lmms-eval"
    )
    is_online: Annotated[  # None: unless the model is a local folder
        bool | None, typer.Option("--online/--offline", help="Use the hub or not; a local folder's default is not.")
    ] = None
    environment: Annotated[Path, typer.Option(show_default=False, help="The harness's, if not `make harness`'s.")] = (
        ENVIRONMENT
    )
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds for the whole run; then it is killed.")
    ] = 86400.0
    harness_options: Annotated[
        list[str], typer.Argument(metavar="[-- OPTION...]", help="For the harness as is, e.g. --force_simple.")
    ] = field(default_factory=list)

    @property
    def chosen_device(self) -> str:
        from mobula.deploy.host.machine import this_machine

        return self.device or ("cuda" if this_machine().num_gpus else "cpu")

    @property
    def is_local(self) -> bool:
        return self.endpoint is None and Path(self.model).is_dir()


def evaluate(options: LmmsEval, announce: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Runs the harness; returns path and content of the artifact. `announce` receives the path of the log."""
    environment = child_environment(options, os.environ)
    command = command_line(options)
    versions = _versions(options.environment, environment)
    started = datetime.now(UTC)
    folder = options.output.absolute() / started.strftime("%Y-%m-%dT%H-%M-%S-%fZ")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise PreflightError(f"{folder} cannot be made ({error.strerror}): give another --output") from error
    announce(f"lmms-eval runs, see {folder / LOG}")
    begin = time.monotonic()
    _run(options, command, environment, folder)
    seconds = time.monotonic() - begin
    try:
        results = read_results(folder / RAW)
    except HarnessError as error:  # the harness ends with 0 when a task or the model raises
        raise HarnessError(f"{error}\n{_end_of(folder / LOG)}") from error
    artifact = {
        "kind": "lmms-eval",
        "created_at": started.isoformat(timespec="seconds"),
        "versions": versions,
        "command": shlex.join(command),
        "model": options.model,
        "endpoint": options.endpoint,
        "limit": options.limit,
        "seconds": round(seconds, 3),
        **results,
        "samples_per_s": round(results["num_samples"] / seconds, 4),
        "log_file": LOG,
    }
    path = folder / ARTIFACT
    write_atomically(path, json.dumps(artifact, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    if num_failed := sum(task["num_failed_requests"] for task in results["tasks"]):
        raise HarnessError(
            f"{num_failed} of {results['num_samples']} answers are the harness's own words for requests that "
            f"failed, and count as wrong answers in {path}: see {folder / LOG}, fix the endpoint, run it again"
        )
    return path, artifact


def command_line(settings: LmmsEval) -> list[str]:
    model_type = settings.model_type or _model_type(settings)
    options = ["--model", model_type, "--model_args", _model_args(settings, model_type), "--tasks", settings.tasks]
    if settings.endpoint is None:
        options += ["--device", settings.chosen_device]
    options += ["--batch_size", str(settings.batch_size), "--output_path", RAW]
    options += ["--log_samples", "--verbosity", "WARNING"]
    if settings.include_path is not None:
        if not settings.include_path.is_dir():
            raise ConfigError(f"--include-path {settings.include_path} is no folder: give the one with the task YAMLs")
        options += ["--include_path", str(settings.include_path.absolute())]
    if settings.limit is not None:
        options += ["--limit", f"{settings.limit:g}"]
    return [str(_python(settings.environment)), "-m", "lmms_eval", "eval", *options, *settings.harness_options]


def child_environment(options: LmmsEval, ours: Mapping[str, str]) -> dict[str, str]:
    """The harness's environment variables: caches in `asked.cache`, the key in no file and on no command line."""
    environment = {**ours, "HF_HOME": str(options.cache.absolute()), "PYTHONUNBUFFERED": "1"}
    is_online = not options.is_local if options.is_online is None else options.is_online
    if not is_online:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if token := environment.pop("HF_TOKEN", ""):  # the harness writes a token that it finds there into its results
        environment["HUGGING_FACE_HUB_TOKEN"] = token
    if options.endpoint is not None:
        if options.key_env is not None and not ours.get(options.key_env):
            raise ConfigError(f"--key-env {options.key_env}: that variable is not set; export the endpoint's key in it")
        environment["OPENAI_API_KEY"] = ours[options.key_env] if options.key_env is not None else "none"
    return environment


def _model_type(options: LmmsEval) -> str:
    if options.endpoint is not None:
        return ENDPOINT
    if not options.is_local:
        raise ConfigError(
            f"{options.model} is no folder here, so its type is not known: give the harness's name for it with "
            f"--model-type, e.g. --model-type qwen2_5_vl"
        )
    try:
        model_type = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{options.model} has no config.json with a model_type: give a checkpoint in the Hugging Face layout"
        ) from error
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{options.model} is a {model_type}, which is none of {', '.join(FAMILIES)}: give the harness's name "
            f"for it with --model-type (`{_python(options.environment)} -m lmms_eval models` lists them)"
        )
    return FAMILIES[model_type]


def _model_args(options: LmmsEval, model_type: str) -> str:
    """Joins the model arguments as NAME=VALUE,...; the user's come last, because the harness keeps the last value."""
    if options.endpoint is not None:
        if any(name in options.model for name in REASONING_NAMES):
            log.warning("%s has the name of a reasoning model to lmms-eval: it sends it no temperature", options.model)
        args = [f"model={options.model}", f"base_url={options.endpoint}", f"num_concurrent={options.batch_size}"]
    else:
        args = [f"pretrained={Path(options.model).absolute() if options.is_local else options.model}"]
        device = options.chosen_device
        if model_type in FAMILIES.values() and device != "cuda":  # "cuda" leaves the model to all GPUs
            args.append(f"device_map={device}")
    cut = [argument for argument in args if "," in argument]
    unfit = [argument for argument in options.model_args if "=" not in argument]
    if cut or unfit:
        raise ConfigError(
            f"{(cut or unfit)[0]}: the harness reads NAME=VALUE and splits at commas; "
            + ("give a path or URL without commas" if cut else "give --model-args NAME=VALUE")
        )
    return ",".join([*args, *options.model_args])


def _python(environment: Path) -> Path:
    return environment.absolute() / "bin" / "python"


def _versions(environment: Path, variables: Mapping[str, str]) -> dict[str, str]:
    python = _python(environment)
    if not python.exists():
        raise PreflightError(f"{environment} holds no environment of lmms-eval: make it with `make harness`")
    ask = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    try:
        ended = run(
            [str(python), "-c", ask, *PACKAGES],
            env=variables,
            capture_output=True,
            text=True,
            timeout=VERSIONS_WITHIN_S,
            check=False,
        )
    except TimeoutExpired as error:
        raise DeadlineError(f"waited {VERSIONS_WITHIN_S:g} s for {python} to tell its versions") from error
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:]
        raise PreflightError(f"{environment} is not whole ({' '.join(last)}): make it with `make harness`")
    return json.loads(ended.stdout)


def _run(options: LmmsEval, command: list[str], environment: Mapping[str, str], folder: Path) -> None:
    from mobula.deploy.host.processes import run_logged

    try:
        code = run_logged(command, environment, folder, folder / LOG, options.timeout_s)
    except TimeoutError as error:
        raise DeadlineError(
            f"lmms-eval was not done within --timeout {options.timeout_s:g} s and was killed; {_end_of(folder / LOG)}"
        ) from error
    if code:
        raise HarnessError(f"lmms-eval ended with {code}; {_end_of(folder / LOG)}")


def _end_of(path: Path) -> str:
    from mobula.deploy.host.processes import last_lines

    return "\n".join([f"the end of {path}:", *last_lines(path, NUM_LAST_LINES)])
