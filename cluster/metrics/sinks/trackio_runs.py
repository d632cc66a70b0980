"""TrackioSink: logs to trackio, in a file below the run folder or on a server."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mobula.cluster.metrics.sinks.base import COLUMNS, TABLE, cells, evaluation_scalars, images, step_scalars
from mobula.cluster.metrics.sinks.trackers import TrackedRun
from mobula.cluster.metrics.step_records import EvaluationRecord, SampleRecord, StepRecord

FOLDER = "trackio"
STEP = "trained_step"


class TrackioSink:
    """Logs to trackio. `TRACKIO_DIR=RUN/trackio trackio show` shows the files below the run folder. trackio finds a run
    by its name, so the name ends with the beginning of the run's id.
    """

    name = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((run.folder / FOLDER).absolute()))  # read by the import
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

    def emit(self, record: StepRecord) -> None:
        self._run.log({STEP: record.step, **step_scalars(record)}, step=record.step)

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        self._run.log({STEP: record.version, **evaluation_scalars(record)}, step=record.version)

    def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
        """Logs a table of the step's responses with their images."""
        image = self._library.Image
        rows = [[*cells(sample), [image(opened) for opened in images(sample)]] for sample in samples]
        table = self._library.Table(columns=[*COLUMNS, "images"], data=rows)
        self._run.log({STEP: samples[0].step, TABLE: table}, step=samples[0].step)

    def close(self) -> None:
        self._run.finish()
