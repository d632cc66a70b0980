"""The Python interface: the names that `import mobula` offers.

    import mobula

    def closeness(request):
        return 1.0 if request.response.text.strip() == request.references[0] else 0.0

    run = mobula.train("HuggingFaceTB/SmolLM2-135M-Instruct", rows, closeness, num_steps=20)
    print(run.summary.accuracy_before, run.summary.accuracy_after)
    run.export(output=Path("policy"))

Each run has a separate process, which leaves a notebook's event loop and the caller's Ray, logging and signal handlers
unchanged. Interrupting the call stops the run in order: it writes a checkpoint, its summary and its report. The run
folder, the report and the audit are those of `mobula train`.
"""

from __future__ import annotations

import html
import inspect
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.report.run_folder import (
    CONFIG_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    RunFinding,
    RunFolder,
    read_run_folder,
)
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.metrics.summary import Summary, read_summary
from mobula.cluster.rollout.evaluation import RESULTS, EvaluationResult
from mobula.configs.load import load_config
from mobula.configs.overrides import leaves
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.plan_command import MemoryPlan, make_plan
from mobula.deploy.run.apart import run_apart
from mobula.deploy.run.run_client import RUNS, named_folder

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Run", "diagnose", "evaluate", "export", "load_config", "plan", "train"]

INPUTS = "inputs"  # of the run folder: rows and functions that a call was given
POLL_S = 0.2
DTypeName = Literal["float32", "bfloat16", "float16"]
Rewards = str | Callable[..., Any] | Sequence[Any] | None


@dataclass(frozen=True, init=False)
class Run:
    """A run by its folder, or by its name below `runs`; `latest` is the newest one. It may go on, or have ended."""

    folder: Path

    def __init__(self, run: Path | str = "latest") -> None:
        """
        Raises:
            PreflightError: there is no such run.
        """
        object.__setattr__(self, "folder", named_folder(run))

    @property
    def summary(self) -> Summary:
        """The content of `summary.json`.

        Raises:
            ValueError: the run is not over, or its driver was killed.
        """
        path = self.folder / SUMMARY_FILE
        if not path.exists():
            raise ValueError(f"{self.folder} has no summary: the run is not over, or was killed (see `mobula report`)")
        return read_summary(path)

    @property
    def report(self) -> Path:
        return self.folder / REPORT_FILE

    @property
    def metrics(self) -> pa.Table:
        """A row for each step, as a `pyarrow.Table`: step, the metrics by name, `r_NAME` of each reward component and
        `NAME_s`, the seconds of each phase."""
        import pyarrow as pa

        from mobula.deploy.pages.report import step_cells

        rows = [step_cells(record) for record in self.records().steps]
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    @property
    def samples(self) -> Sequence[Any]:
        """Responses that the run kept for its report, with their rewards."""
        return self.records().samples.samples

    def records(self) -> RunFolder:
        """Steps, evaluations, samples, faults and skipped rows, read from the folder.

        Raises:
            ValueError: a file of the folder cannot be read.
        """
        return read_run_folder(self.folder)

    def plot(self) -> Page:
        """The report with its charts, which a notebook shows; also of a run that goes on."""
        from mobula.deploy.pages.report import report_page

        return Page(report_page(self.folder))

    def export(self, **options: Any) -> Path:
        """As `mobula.export`."""
        return export(self.folder, **options)


@dataclass(frozen=True)
class Page:
    """An HTML page that a notebook shows in a frame."""

    text: str

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.text)}" width="100%" height="800" style="border:0"></iframe>'


def train(
    model: str | Path | RunConfig,
    data: Any = None,
    rewards: Rewards = None,
    *,
    algorithm: str | Callable[..., Any] | None = None,
    environment: str | type | None = None,
    resources: str | None = None,
    name: str | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
    **overrides: Any,
) -> Run:
    """Trains a model in a new process and waits for it; log lines go to `sys.stdout`.

    Args:
        model: a checkpoint folder, a hub name, or a whole configuration (`load_config`) in place of all else.
        data: a list of rows (dicts, images as PIL images or paths), a `Dataset` or `DatasetDict` of Hugging Face, a
            dict of splits, a folder, or a hub name. Without a validation split, `data.validation_fraction` is held out.
        rewards: a function of a request (docs/rewards.md), the name of an option, or `FILE.py:NAME`; a list of
            functions and names of built-in ones, each alone or as (function, weight).
        algorithm: the name of an option, or a function that computes advantages.
        environment: a class, or the name of an environment, whose episodes take the place of rows.
        resources: the name of a preset; by default of this machine's.
        name: of the run folder, below `runs`; by default the time.
        on_step: called with the record of each finished step.
        overrides: configuration keys, as `num_steps=20`, `learner={"learning_rate": 1e-6}` or
            `**{"learner.learning_rate": 1e-6}`.

    Functions and classes go to the workers by value; the run folder keeps them and their source in `inputs/`.

    Raises:
        PreflightError: the run cannot start; no worker was started.
        MobulaError: the run failed. `Run(name)` has the finished steps.
        KeyboardInterrupt: the call was interrupted; the run has written its checkpoint and report.
    """
    config = model
    if not isinstance(config, RunConfig):
        given = _Given(Path(overrides.get("folder", RUNS)), name or time.strftime("run-%Y%m%d-%H%M%S"))
        config = load_config(given.words(str(model), data, rewards, algorithm, environment, resources, overrides))
    run_apart("train", config, [], on_step)
    return Run(config.run_folder)


def evaluate(
    what: Run | RunConfig | str | Path,
    data: Any = None,
    rewards: Rewards = None,
    *,
    output: Path | None = None,
    **overrides: Any,
) -> list[EvaluationResult]:
    """Scores a policy on held-out prompts; returns one result a suite.

    Args:
        what: a run, whose own data and rewards are taken; a model, with `data` and `rewards` as for `train`; or a whole
            configuration.
        output: directory for the results and the responses.
        overrides: as for `train`; of a run, single keys.

    Raises:
        PreflightError, MobulaError, KeyboardInterrupt: as for `train`.
    """
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(what, RunConfig):
            config = what
        elif isinstance(what, Run) or (data is None and _isrun_apart(what)):
            from mobula.deploy.run.export import trained_config

            config = trained_config(what.folder if isinstance(what, Run) else what, list(_words(overrides)))
        else:
            given = _Given(Path(folder), "evaluation")
            config = load_config(given.words(str(what), data, rewards, None, None, None, overrides))
        target = output or Path(folder)
        run_apart("evaluate", config, ["--output", str(target)])
        rows = json.loads((target / "evaluation.json").read_text(encoding="utf-8"))
    return RESULTS.validate_python(rows)


def diagnose(run: Run | Path | str = "latest", *, deep: bool = False) -> list[RunFinding]:
    """Why does it not learn? Checks a run and returns the findings, the worst first.

    Args:
        deep: also trains and scores recorded groups (`replay.trajectory_log`); minutes.

    Raises:
        PreflightError: there is no such run, or it cannot be read.
    """
    from mobula.deploy.report.diagnose import command  # it imports torch

    return command.diagnose(command.subject_of([], _folder(run)), is_deep=deep)


def plan(config: RunConfig, *, nodes: str | None = None, cluster: Path | None = None) -> MemoryPlan:
    """Places the workers of `config` and adds up their memory, as `mobula plan` does.

    Args:
        nodes: short description of the nodes, such as `2x8x80GB`; this machine if neither is given.
        cluster: a YAML file that describes the nodes.

    Raises:
        PreflightError: CPUs, GPUs or memory do not suffice; the message names settings that would.
    """
    return make_plan(config, short=nodes, file=cluster)


def export(
    run: Run | Path | str,
    *,
    step: int | None = None,
    merge: bool = False,
    ema: bool = False,
    dtype: DTypeName | None = None,
    output: Path | None = None,
) -> Path:
    """Writes the policy of a run's checkpoint for transformers or PEFT; returns the directory.

    Args:
        step: the checkpoint; the newest one by default.
        merge: merge LoRA adapters into the weights.
        ema: export the exponential moving average of the weights (`learner.ema_decay`).
        dtype: the dtype of all tensors; that of `policy.model` by default.
        output: the directory to write; `export/` in the run folder by default.

    Raises:
        PreflightError: there is no such run or checkpoint, or the directory exists or cannot be written.
    """
    from mobula.deploy.run.export import export_policy  # it imports torch

    return export_policy(_folder(run), step, merge=merge, ema=ema, dtype=dtype, output=output).path


def _folder(run: Run | Path | str) -> Path:
    return run.folder if isinstance(run, Run) else named_folder(run)


def _isrun_apart(name: str | Path) -> bool:
    return any((folder / CONFIG_FILE).is_file() for folder in (Path(name), RUNS / name))


class _Given:
    """The words of a run whose parts were given as Python objects, which are written to files of its folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._inputs = (folder / name / INPUTS).absolute()

    def words(
        self,
        model: str,
        data: Any,
        rewards: Rewards,
        algorithm: Any,
        environment: Any,
        resources: Any,
        others: Mapping[str, Any],
    ) -> list[str]:
        is_run = others.get("experiment", "own") == "own"
        words = [f"name={self._name}", f"policy.model={model}", *(["experiment=own"] if is_run else [])]
        words += [f"resources={resources or _preset()}"]
        if data is not None:
            words += self._data(data)
        if environment is not None:
            words += ["data=environment", f"environment.name={self._code(environment)}"]
            rewards = rewards or "environment"
        if rewards is not None:
            words += self._rewards(rewards)
        if algorithm is not None:
            words.append(f"algorithm{'' if isinstance(algorithm, str) else '.advantage'}={self._code(algorithm)}")
        return [*dict.fromkeys(words), *_words(others)]

    def _rewards(self, rewards: Rewards) -> list[str]:
        if not isinstance(rewards, list | tuple):
            return [f"rewards={self._code(rewards)}"]
        pairs = [pair if isinstance(pair, tuple) else (pair, 1.0) for pair in rewards]
        functions = [(self._code(function), float(weight)) for function, weight in pairs]
        names = [reference.rpartition(":")[2] for reference, _ in functions]
        parts = [
            {"name": name, "function": reference, "weight": weight}
            for name, (reference, weight) in zip(names, functions, strict=True)
        ]
        return [f"rewards.components={_literal(parts)}", f"rewards.accuracy_component={names[0]}"]

    def _data(self, data: Any) -> list[str]:
        if isinstance(data, str | Path):
            return [f"data.path={data}", *([] if Path(data).exists() else ["data=huggingface"])]
        splits = data if isinstance(data, Mapping) else {"train": data}
        folder = self._inputs / "data"
        if all(isinstance(rows, list | tuple) for rows in splits.values()):
            try:
                lines = {split: [json.dumps(row) for row in rows] for split, rows in splits.items()}
            except TypeError:  # images in memory
                splits = {split: _datasets().Dataset.from_list(list(rows)) for split, rows in splits.items()}
            else:
                folder.mkdir(parents=True, exist_ok=True)
                for split, texts in lines.items():
                    (folder / f"{split}.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
                return [f"data.path={folder}"]
        _datasets().DatasetDict(splits).save_to_disk(str(folder))
        return ["data=huggingface", f"data.path={folder}"]

    def _code(self, value: Any) -> str:
        """The name of a function or class in a file of the run folder that has it by value; names stay as they are."""
        if isinstance(value, str):
            return value
        import cloudpickle

        name = value.__name__ if value.__name__.isidentifier() else "own"
        module, path = inspect.getmodule(value), self._inputs / f"{name}.py"
        is_local = module is not None and module.__name__ != "__main__" and "site-packages" not in str(module.__file__)
        if is_local:
            cloudpickle.register_pickle_by_value(module)
        try:
            content = cloudpickle.dumps(value)
        except Exception as error:  # the type depends on the value
            raise PreflightError(f"{name} cannot be sent to workers ({error}): give it as FILE.py:{name}") from error
        finally:
            if is_local:
                cloudpickle.unregister_pickle_by_value(module)
        try:
            source = "".join(f"# {line}\n" for line in inspect.getsource(value).splitlines())
        except (OSError, TypeError):
            source = "# (its source is not known)\n"
        self._inputs.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".pkl").write_bytes(content)
        path.write_text(_LOADER.format(name=name, source=source), encoding="utf-8")
        return f"{path}:{name}"


_LOADER = '''"""`{name}` as it was given to a call of `mobula`, by value. Its source:"""

{source}
import pickle
from pathlib import Path

{name} = pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


def _datasets() -> Any:
    if find_spec("datasets") is None:
        raise PreflightError("rows with images in memory need the package datasets: install mobula[data]")
    import datasets

    return datasets


def _preset() -> str:
    from mobula.deploy.host.machine import this_machine

    return {0: "laptop", 1: "gpu_1"}.get(this_machine().num_gpus, "two_gpu")


def _words(overrides: Mapping[str, Any]) -> Iterator[str]:
    for key, value in overrides.items():
        for name, leaf in leaves(value, key):
            yield f"{name}={leaf}" if isinstance(leaf, str | Path) else f"{name}={_literal(leaf)}"


def _literal(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_literal, value)) + "]"
    if isinstance(value, str | Path):
        return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)
