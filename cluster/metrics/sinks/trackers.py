"""Experiment trackers: MLflow, SwanLab, trackio, and Weights & Biases. The library of each is an optional extra."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.sinks.base import COLUMNS, TABLE, ScalarSink, Sink, cells, images
from mobula.cluster.metrics.step_records import SampleRecord
from mobula.cluster.user_code import chosen, is_user_code

MLFLOW_CONFIG = "config.yaml"
MLFLOW_RUN_ID = "mobula.run_id"  # tag
UNFIT = re.compile(r"[^\w\-./ ]")  # characters that MLflow refuses in a name
STEP = "trained_step"  # the axis in trackio and wandb
STAGED = "wandb/data"  # tables with images before they are sent


@dataclass(frozen=True)
class TrackedRun:
    """Identity of a run in a tracker: `run_id`. A resumed run continues under its id; another run of the same name has
    another id."""

    run_id: str
    name: str
    project: str
    folder: Path  # run folder; local files are below it
    address: str  # of the tracker's server; empty: local files only
    config: Mapping[str, Any]  # resolved


class MlflowSink(ScalarSink):
    """Logs to one MLflow run per run. A resumed run finds it by the tag `mobula.run_id` in the experiment, which is the
    project."""

    name = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        if not run.address:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise MLflow requires a database
        uri = run.address or (run.folder / "mlruns").absolute().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(run.project)
        earlier = self._client.search_runs([experiment], f"tags.`{MLFLOW_RUN_ID}` = '{run.run_id}'", max_results=1)
        if earlier:
            self._run_id = earlier[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {MLFLOW_RUN_ID: run.run_id}
            self._run_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            self._client.log_text(self._run_id, yaml.safe_dump(dict(run.config), sort_keys=False), MLFLOW_CONFIG)

    def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
        """Writes artifacts below `samples/step-000003`: a table, and each image under the kind of its response."""
        folder = f"{TABLE}/step-{samples[0].step:06d}"
        rows = [dict(zip(COLUMNS, cells(sample), strict=True)) for sample in samples]
        self._client.log_dict(self._run_id, {TABLE: rows}, f"{folder}/{TABLE}.json")
        for sample in samples:
            for number, image in enumerate(images(sample)):
                self._client.log_image(self._run_id, image, artifact_file=f"{folder}/{sample.kind}-{number}.png")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        metrics = [Metric(UNFIT.sub("_", name), float(value), now_ms, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)


class TrackioSink(ScalarSink):
    """Logs to trackio. `TRACKIO_DIR=RUN/trackio trackio show` shows the files below the run folder. trackio finds a run
    by its name, so the name ends with the beginning of the run's id."""

    name = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((run.folder / "trackio").absolute()))  # read by the import
        import trackio

        self._library = trackio
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.run_id[:8]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
            server_url=run.address or None,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log({STEP: step, **scalars}, step=step)

    def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
        image = self._library.Image
        rows = [[*cells(sample), [image(opened) for opened in images(sample)]] for sample in samples]
        table = self._library.Table(columns=[*COLUMNS, "images"], data=rows)
        self._run.log({STEP: samples[0].step, TABLE: table}, step=samples[0].step)

    def close(self) -> None:
        self._run.finish()


class WandbSink(ScalarSink):
    """Logs offline without an address: `wandb sync` sends the folder later. WANDB_API_KEY or ~/.netrc has the key of a
    server. The axis of every chart is the step, because an evaluation may end after later steps."""

    name = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_DATA_DIR", str((run.folder / STAGED).absolute()))  # the default is the home folder
        server = {"base_url": run.address} if run.address else {}
        settings = wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True, **server)
        self._library = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            dir=run.folder,
            config=dict(run.config),
            mode="online" if run.address else "offline",
            resume="allow" if run.address else None,
            settings=settings,
        )
        self._run.define_metric("*", step_metric=STEP)

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log({STEP: step, **scalars})

    def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
        """Logs a table of the step's responses, each with its first image, and all images by kind of response."""
        shown = {s.kind: [self._library.Image(image, caption=s.response) for image in images(s)] for s in samples}
        rows = [[*cells(sample), next(iter(shown[sample.kind]), None)] for sample in samples]
        table = self._library.Table(columns=[*COLUMNS, "image"], data=rows)
        by_kind = {f"{TABLE}_{kind}": panel for kind, panel in shown.items() if panel}
        self._run.log({STEP: samples[0].step, TABLE: table, **by_kind})

    def close(self) -> None:
        self._run.finish()


class SwanlabSink(ScalarSink):
    """Logs offline without an address: `swanlab sync` sends the folder later. SWANLAB_API_KEY or `swanlab login` has
    the key of a server. SwanLab has no tables: responses are texts."""

    name = "swanlab"

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        unread = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)
        server = {"api_host": run.address, "web_host": run.address} if run.address else {}
        self._library = swanlab
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            log_dir=str(run.folder / "swanlab"),
            config=dict(run.config),
            mode="online" if run.address else "offline",
            resume="allow",
            settings=swanlab.Settings(interactive=False, probe=unread, terminal={"proxy_type": "none"}, **server),
        )

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(scalars, step=step)

    def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
        """Logs the responses of each kind as texts, and their images."""
        for kind in dict.fromkeys(sample.kind for sample in samples):
            own = [sample for sample in samples if sample.kind == kind]
            texts = [yaml.safe_dump(dict(zip(COLUMNS, cells(s), strict=True)), sort_keys=False) for s in own]
            panel: dict[str, Any] = {f"{TABLE}/{kind}": list(map(self._library.Text, texts))}
            if shown := [self._library.Image(image, caption=s.response) for s in own for image in images(s)]:
                panel[f"{TABLE}/{kind}_images"] = shown
            self._run.log(panel, step=samples[0].step)

    def close(self) -> None:
        self._run.finish()


# Name of the tracker, its library and its extra -> class of the sink
TRACKERS: Mapping[str, Callable[[TrackedRun], Sink]] = {
    "mlflow": MlflowSink,
    "swanlab": SwanlabSink,
    "trackio": TrackioSink,
    "wandb": WandbSink,
}


def refuse_missing(names: Sequence[str]) -> None:
    """Raises: PreflightError: the library of a tracker is not installed."""
    missing = [name for name in names if not is_user_code(name) and find_spec(name) is None]
    if missing:
        extras = ",".join(missing)
        raise PreflightError(
            f"metrics.trackers={list(names)} needs {', '.join(missing)}, which is not installed: "
            f"`pip install 'mobula[{extras}]'` on the machine of the driver, or take it out of metrics.trackers"
        )


def tracker(name: str) -> Callable[[TrackedRun], Sink]:
    return chosen(TRACKERS, name, "metrics.trackers", ("run",))
