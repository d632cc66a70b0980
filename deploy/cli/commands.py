"""The `mobula` command: train, evaluate, replay, score, lmms-eval, serve-rewards, status and others.

Backends are imported inside the commands that use them, so that `--help` and `show-config` answer at once.
Exit codes are in `deploy/cli/errors.py`.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from mobula.cluster.errors import FAILED, PreflightError, RunOverError
from mobula.cluster.failures import escaped
from mobula.cluster.runtime.gc_tuning import collect_rarely
from mobula.cluster.workers.status import MAX_WORKERS
from mobula.configs.errors import ConfigError
from mobula.configs.schema import RunConfig
from mobula.configs.schema.run import LATEST
from mobula.deploy.cli.check_commands import audit, diagnose, diagnosed, doctor, gpu_check, lmms_eval, plan, rehearse
from mobula.deploy.cli.errors import explained
from mobula.deploy.cli.job_commands import list_jobs, logs, stop, submit
from mobula.deploy.cli.options import (
    AuthOption,
    ConfigFile,
    Deadline,
    Overrides,
    RunCluster,
    RunFolder,
    RunName,
    RunWords,
    run_and_words,
    takes,
)
from mobula.deploy.cli.serving_commands import (
    play,
    rollout,
    serve_environment,
    serve_policy,
    serve_rewards,
    serve_training,
)
from mobula.deploy.data.options import ScoreCommand
from mobula.deploy.host.authentication import set_auth
from mobula.deploy.host.terminal import open_missing_streams, outlive_output, terminal, write_any_text
from mobula.deploy.preloading.preloaded import preloaded

data = typer.Typer(help="Look at a data set, or write it in another form.", no_args_is_help=True)

DataWords = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As for train, e.g. data=verl data.path=FOLDER.")
]


@data.command()
def inspect(
    overrides: DataWords = None,
    split: Annotated[str, typer.Option(help="The split to look at.")] = "train",
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("data.html"),
    samples: Annotated[int, typer.Option(min=0, help="Samples that are shown.")] = 24,
) -> None:
    """Write a page of samples, lengths, labels and skipped rows; with policy.model=, lengths are in tokens."""
    from mobula.configs.load import load_config

    with explained():
        config = load_config(overrides or [], is_complete=False)
        from mobula.deploy.data import data_command

        raise typer.Exit(data_command.inspect(config, split, output, samples, terminal()))


@data.command()
def convert(
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write; it must not hold anything.")],
    overrides: DataWords = None,
    split: Annotated[list[str] | None, typer.Option(help="A split to write, again for more; else all three.")] = None,
) -> None:
    """Write the rows of a data set as messages in JSONL, as offline jobs read them, with their media in files."""
    from mobula.configs.load import load_config

    with explained():
        config = load_config(overrides or [], is_complete=False)
        from mobula.deploy.data import data_command

        splits = split or ["train", "validation", "test"]
        data_command.convert(config, output, splits, terminal())


def replay(words: RunWords = None, run: RunFolder = None) -> None:
    """Train a learner on the recorded steps of a run that had replay.trajectory_log=true, without rollouts."""
    from mobula.configs.load import CONFIG_FILE, load_resolved
    from mobula.deploy.run.run_client import named_folder

    with explained():
        name, overrides = run_and_words(words, run)
        run_folder = named_folder(name)
        config = load_resolved(run_folder / CONFIG_FILE, overrides)
        from mobula.deploy.data.replay import replay as train_again

        raise typer.Exit(train_again(run_folder, config))


@takes(ScoreCommand)
def score(command: ScoreCommand) -> None:
    """Score recorded responses by the rewards of a run: averages, pass rate, best and worst."""
    with explained():
        from mobula.deploy.data.score import score as run_score

        if not math.isfinite(command.pass_threshold):
            raise PreflightError(f"--pass-threshold {command.pass_threshold}: give a finite number")
        raise typer.Exit(run_score(command, terminal()))


class Commands(TyperGroup):
    """Says how a key is given that was written as an option."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # The class of click, or of the copy of it that typer has.
            key = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
            if key and type(error).__name__ == "NoSuchOption":
                error.message += f": keys are words without dashes, write {key}=VALUE"  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    cls=Commands,
    help="RL post-training of vision-language models on a Ray actor/learner cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEADLINE_S = 60.0
PRIVATE = 0o077  # umask until a configuration says otherwise (folder_access)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        terminal().print(f"mobula {metadata.version('mobula')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """RL post-training of vision-language models on a Ray actor/learner cluster."""


def main() -> None:
    if any(name.lower().endswith("_proxy") for name in os.environ):
        from mobula.cluster.proxies import bypass_loopback

        bypass_loopback(os.environ)  # also for Ray's dashboard and for child processes
    os.umask(PRIVATE)
    collect_rarely()
    open_missing_streams()
    write_any_text()
    outlive_output("stderr")
    try:
        app()
    except Exception:  # a bug; its message may quote a run
        sys.stderr.write(escaped(traceback.format_exc()))
        raise SystemExit(FAILED) from None


def train(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    run: Annotated[
        str | None, typer.Option("--continue", metavar="RUN", help="Go on with this run, as `mobula resume` does.")
    ] = None,
) -> None:
    """Train: warm start, evaluation, RL or an offline job, evaluation, report."""
    with explained():
        if run is None:
            config = _config(overrides or [], config_file)
        else:
            from mobula.deploy.run.run_client import config_to_go_on

            config = config_to_go_on(run, overrides or [])
        if config.seeds:
            from mobula.deploy.report.claims import train_seeds

            raise typer.Exit(train_seeds(config, terminal(soft_wrap=False)))
        with preloaded(config) as workers, diagnosed(config):
            from mobula.deploy.run import runtime

            code = runtime.train(config, workers)
        raise typer.Exit(code)


def resume(words: RunWords = None, run: RunFolder = None) -> None:
    """Go on with a run by its own configuration; num_steps=+10 trains ten steps more than it had."""
    name, overrides = run_and_words(words, run)
    train(overrides, run=name or LATEST)


def _offline_job(job: str, text: str) -> Callable[..., None]:
    """The command of an offline job: `mobula train` with the experiment of its name."""

    def command(overrides: Overrides = None) -> None:
        _train_offline(job, overrides or [])

    command.__name__, command.__doc__ = job, f"{text}: train with experiment={job}."
    return command


sft = _offline_job("sft", "Fine-tune on the assistant's turns of conversations")
reward_model = _offline_job("reward_model", "Train a reward model on pairs or scored answers")
dpo = _offline_job("dpo", "Direct preference optimisation on pairs of answers")
kto = _offline_job("kto", "Preference optimisation on single answers with a label (KTO)")


def evaluate(
    words: RunWords = None,
    run: RunFolder = None,
    scheme: Annotated[str | None, typer.Option(help="Short for evaluation=SCHEME, e.g. maye.")] = None,
    output: Annotated[Path | None, typer.Option(help="The folder for evaluation.json and for saved responses.")] = None,
    config_file: ConfigFile = None,
) -> None:
    """Score the policy of a run, or of words, on the held-out split, and on the suites of an evaluation scheme."""
    with explained():
        name, overrides = run_and_words(words, run)
        overrides = [*([f"evaluation={scheme}"] if scheme else []), *overrides]
        if name is None:
            config = _config(overrides, config_file)
        else:
            from mobula.deploy.run.export import trained_config

            config = trained_config(name, overrides)
        with preloaded(config) as workers:
            from mobula.deploy.run import runtime

            code = runtime.evaluate(config, output, workers)
        raise typer.Exit(code)


def claims(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]... [KEY=VALUE]...", help="Claims, all if left out; overrides for every run."),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="The folder of NAME.yaml; else examples/claims.")] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Add the verdicts to this file.")] = None,
) -> None:
    """Train the runs of claims over seeds, and say of each whether it holds."""
    with explained():
        from mobula.deploy.report.claims import SHIPPED, check_claims, read_claims

        names = [word for word in words or [] if "=" not in word]
        overrides = [word for word in words or [] if "=" in word]
        read = read_claims(names, folder or SHIPPED)
        raise typer.Exit(check_claims(read, overrides, json, terminal(soft_wrap=True)))


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="[LABEL=]RUN[,RUN...]...", help="Seeds of one setting are joined by commas.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The page to write; by default comparison.html in the folder of the runs.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the table as JSON, too.")] = None,
    by_epoch: Annotated[bool, typer.Option("--by-epoch", help="Draw over epochs instead of steps.")] = False,
) -> None:
    """Compare runs on one page: curves, intervals and a table."""
    with explained():
        from mobula.deploy.report.comparison import compare as write

        write(runs, output, json, by_epoch, terminal())


def status(
    name: RunName = None,
    run: RunFolder = None,
    address: RunCluster = None,
    auth: AuthOption = "disabled",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    timeout: Deadline = DEADLINE_S,
) -> None:
    """Show phase, queue and workers of a running run, or the numbers of an ended run."""
    with explained():
        from mobula.deploy.run.run_client import find_run, read_status

        set_auth(auth)
        try:
            run_status = read_status(find_run(name, run, address), timeout)
        except RunOverError:
            from mobula.deploy.run.run_report import show_ended

            if address is None and show_ended(run or name, terminal(soft_wrap=True), is_json=json):
                return
            raise
    from mobula.deploy.jobs.status_view import as_json, as_table

    if json:
        terminal(soft_wrap=True).print(as_json(run_status))
    else:
        terminal().print(as_table(run_status, time.time()))


def top(
    name: RunName = None,
    run: RunFolder = None,
    address: RunCluster = None,
    auth: AuthOption = "disabled",
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 2.0,
    timeout: Deadline = DEADLINE_S,
) -> None:
    """Watch a running run: phase, speed, time left, queue, workers and their versions."""
    with explained("the run goes on"):
        from mobula.deploy.jobs.status_view import show_top
        from mobula.deploy.run.run_client import find_run

        set_auth(auth)
        console = terminal()
        ended = show_top(find_run(name, run, address), console, interval_s=interval, timeout_s=timeout)
    console.print(ended)


def scale(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="ROLE=N... [NAME]", help="Workers each role is to have, e.g. rollout=4 reward=8."),
    ],
    run: RunFolder = None,
    address: RunCluster = None,
    auth: AuthOption = "disabled",
    timeout: Deadline = DEADLINE_S,
) -> None:
    """Change the number of workers of a running run's roles; workers that leave finish their work first."""
    with explained():
        from mobula.deploy.run import run_client

        set_auth(auth)
        wanted, name = _parse_scale(arguments)
        outcomes = run_client.scale(run_client.find_run(name, run, address), wanted, timeout)
    console = terminal(soft_wrap=True)
    for outcome in outcomes:
        console.print(f"{outcome.role}={outcome.num_workers}", style="green" if outcome.is_accepted else "red", end=" ")
        message = "accepted: `mobula status` shows who joins and who leaves" if outcome.is_accepted else outcome.refusal
        console.print(message)
    if not all(outcome.is_accepted for outcome in outcomes):
        raise typer.Exit(FAILED)


def report(name: RunName = None, run: RunFolder = None) -> None:
    """Write report.html of a finished run again, also if its driver was killed before it wrote the report."""
    with explained():
        from mobula.deploy.run.run_report import report_again

        path = report_again(run or name)
    terminal(soft_wrap=True).print(f"report: {path}")


def export(
    name: RunName = None,
    run: RunFolder = None,
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint; the newest one if it is left out.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into the weights.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (learner.ema_decay).")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="The dtype of all tensors; that of policy.model if it is left out."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The folder to write; else export/ in the run folder.")] = None,
) -> None:
    """Write the policy of a run's checkpoint for transformers, PEFT and others; the run may go on."""
    with explained():
        from mobula.deploy.run import export as exporting

        raise typer.Exit(exporting.export(run or name, step, merge=merge, ema=ema, dtype=dtype, output=output))


def show_config(overrides: Overrides = None) -> None:
    """Print the whole configuration as YAML, with groups and overrides resolved. User code is imported and checked."""
    from mobula.cluster.user_code import names_user_code
    from mobula.configs.load import dump_config, load_config

    with explained():
        config = load_config(overrides or [], is_complete=False)
        if names_user_code(config.model_dump(mode="json")):
            from mobula.deploy.preflight.user_code import check_user_code

            check_user_code(config)
    terminal(soft_wrap=True).print(dump_config(config), end="")


def init_model(
    model: Annotated[
        str, typer.Argument(help="tiny-FAMILY or smollm2-135m, the model to write; a wrong name lists all.")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write it to; it must not hold anything else.")],
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the random weights.")] = 0,
    tied: Annotated[bool, typer.Option("--tied/--untied", help="Tie output and input embeddings.")] = False,
) -> None:
    """Write a small model in the Hugging Face layout: random weights, or released ones from an installed package."""
    with explained():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there and not an empty folder: give another folder, or remove it first")
        from mobula.deploy.wiring.preparation import TINY_DRAWN, model_writers
        from mobula.learner.policies.pretrained import PRETRAINED
        from mobula.learner.policies.tiny import TINY

        name = model.removeprefix("tiny-")
        if model not in PRETRAINED and (name == model or name not in (*TINY, *TINY_DRAWN)):
            names = ", ".join([*PRETRAINED, *(f"tiny-{name}" for name in (*TINY, *TINY_DRAWN))])
            raise ConfigError(f"there is no model {model} to write: choose {names}")
        if tied and model in PRETRAINED:
            raise ConfigError(f"{model} ties its embeddings as the released model does: leave --tied out")
        if tied and name in TINY_DRAWN:
            raise ConfigError(f"{model} has no output embeddings to tie: leave --tied out")
        try:
            written = model_writers(is_tied=tied)[name](folder, seed=seed)
        except OSError as error:
            raise PreflightError(f"{folder} cannot be written ({error.strerror}): give another folder") from error
    sampler = f"sampler={TINY_DRAWN[name]} " if name in TINY_DRAWN else ""
    use = f"use it with {sampler}policy.model={written}"
    message = f"{model} written to {written}: {use}"
    terminal(soft_wrap=True).print(message)


def _config(overrides: Sequence[str], file: Path | None) -> RunConfig:
    from mobula.configs.load import load_config, load_resolved

    return load_config(overrides) if file is None else load_resolved(file, overrides)


def _train_offline(job: str, overrides: Sequence[str]) -> None:
    from mobula.configs.load import load_config
    from mobula.configs.overrides import overridden

    with explained():
        resolved = overridden([f"experiment={job}"], overrides)
        config = load_config(resolved)
        if config.offline.job != job:
            raise ConfigError(
                f"offline.job={config.offline.job} with {' '.join(resolved)}: use `mobula train`, or name an "
                f"experiment whose offline.job is {job}"
            )
    train(resolved)


def _parse_scale(arguments: Sequence[str]) -> tuple[dict[str, int], str | None]:
    pairs = [argument.partition("=") for argument in arguments if "=" in argument]
    names = [argument for argument in arguments if "=" not in argument]
    bad = [f"{role}={num}" for role, _, num in pairs if not _is_number_of_workers(num)]
    if bad or not pairs or len(names) > 1:
        raise PreflightError(
            f"{' '.join(bad or arguments)}: say how many workers (1 to {MAX_WORKERS}) which role is to have, and at "
            "most one run's name, e.g. `mobula scale rollout=4 reward=8`"
        )
    return {role: int(num) for role, _, num in pairs}, names[0] if names else None


def _is_number_of_workers(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(MAX_WORKERS)) and 1 <= int(text) <= MAX_WORKERS


app.add_typer(data, name="data")
for _command in (
    *(train, resume, sft, reward_model, dpo, kto, evaluate, compare, status, top, scale),
    *(replay, report, export, score, plan, claims),
    *(show_config, init_model, serve_rewards, doctor, audit, diagnose, gpu_check, rehearse, lmms_eval, play, rollout),
    *(serve_environment, serve_policy, serve_training, submit, stop, logs),
):
    app.command()(_command)
app.command("list")(list_jobs)
