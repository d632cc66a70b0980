"""MlflowSink: logs to MLflow, in files below the run folder or on a tracking server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

import mlflow
import yaml
from mlflow.entities import Metric

from mobula.cluster.metrics.sinks.base import COLUMNS, TABLE, cells, evaluation_scalars, images, step_scalars
from mobula.cluster.metrics.sinks.trackers import TrackedRun
from mobula.cluster.metrics.step_records import EvaluationRecord, SampleRecord, StepRecord

FOLDER = "mlruns"
CONFIG_FILE = "config.yaml"
RUN_ID = "mobula.run_id"  # tag
UNFIT = re.compile(r"[^\w\-./ ]")  # characters that MLflow refuses in a name


class MlflowSink:
    """Logs to one MLflow run per run. A resumed run finds it by the tag `mobula.run_id` in the experiment, which is the
    project."""

    name = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        if not run.address:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise MLflow requires a database
        uri = run.address or (run.folder / FOLDER).absolute().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(run.project)
        earlier = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.run_id}'", max_results=1)
        if earlier:
            self._run_id = earlier[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {RUN_ID: run.run_id}
            self._run_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            self._client.log_text(self._run_id, yaml.safe_dump(dict(run.config), sort_keys=False), CONFIG_FILE)

    def emit(self, record: StepRecord) -> None:
        self._log(step_scalars(record), record.step)

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        self._log(evaluation_scalars(record), record.version)

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
        now_ms = int(1000 * time.time())
        metrics = [Metric(UNFIT.sub("_", name), float(value), now_ms, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
