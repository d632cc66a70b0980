"""The wiring of an offline job: the main loop with data set rows instead of rollouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from mobula.actors.datasets.rows import count_by_reason
from mobula.actors.reference.pool import NullReference, ReferencePool
from mobula.cluster.controller import Controller
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.step_records import EvaluationRecord
from mobula.cluster.metrics.summary import wilson_interval
from mobula.cluster.recovery.checkpoints import Recovery
from mobula.cluster.rollout.evaluation import EvaluationSchedule, RowEvaluator
from mobula.cluster.rollout.row_stream import RowStream, stored
from mobula.cluster.weight_sync.interfaces import NoReceivers
from mobula.cluster.workers.status import Scalable
from mobula.cluster.workers.supervisor import Supervisor, Watched
from mobula.deploy.wiring.build import POLICY_FOLDER
from mobula.deploy.wiring.evaluation import content_of
from mobula.deploy.wiring.persistence import RunContext, checkpoints_of
from mobula.deploy.wiring.preparation import PreparedRows
from mobula.deploy.wiring.roles import reference_folder, reference_pool, spawn_learner, watched_reference
from mobula.deploy.wiring.spawner import Spawner
from mobula.learner.learner_group import LearnerGroup

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OfflineTraining:
    learner: LearnerGroup
    reference: ReferencePool | NullReference
    rows: RowStream
    watched: tuple[Watched, ...]

    @property
    def scalable(self) -> dict[str, Scalable]:
        return {"reference": self.reference.pool} if isinstance(self.reference, ReferencePool) else {}


def spawn_offline(
    prepared: PreparedRows,
    spawner: Spawner,
    run: RunContext,
    beside: Sequence[Watched],
) -> OfflineTraining:
    """Starts the learner ranks, and reference scorers if the job compares with the initial policy. The supervisor also
    watches the roles in `beside`."""
    config = prepared.config
    learner, watched = spawn_learner(prepared, spawner, run.lost)
    frozen = reference_folder(config)
    reference = reference_pool(config, spawner, frozen, (), teachers={}, on_lost=run.lost, on_retry=run.rescored)
    rows = RowStream(prepared.source(), ray.put, reference, total_steps=config.num_steps)
    return OfflineTraining(learner, reference, rows, (*watched, *watched_reference(reference), *beside))


def build_offline_controller(
    prepared: PreparedRows,
    training: OfflineTraining,
    run: RunContext,
    put: Callable[[Any], Any] = ray.put,
) -> Controller:
    """Builds the main loop of an offline job and its collaborators. Prepares the held-out rows: call it in a thread,
    since the event loop serves the processor workers."""
    config, metrics = run.config, run.metrics
    training.learner.losses.observers.append(run.audit)
    held_out = prepared.fixed_prompts(config.evaluation.split, config.evaluation.num_prompts)
    rows = [stored(row, 0, put) for row in held_out.prompts]
    identity = {
        "split": config.evaluation.split,
        "num_prompts": len(rows),
        "num_samples": 1,
        "rows": content_of([row.summary.sha256 for row in rows]),
        "objective": content_of(config.offline.model_dump(mode="json", exclude={"batch_size"})),
    }
    evaluator = RowEvaluator(
        rows=rows,
        learner=training.learner,
        reference=training.reference,
        schedule=EvaluationSchedule(config.evaluation.interval_steps, config.num_steps),
        on_result=partial(_record_result, metrics, identity),
        identity=identity,
    )
    checkpoints = checkpoints_of(
        run,
        prepared.identity,
        training.learner,
        Recovery(),
        parts={"stream": training.rows, "evaluator": evaluator},
        prepare=partial(_freeze_reference, prepared, training.learner),
        finish=partial(training.learner.export, config.run_folder / POLICY_FOLDER),
    )
    return Controller(
        total_steps=config.num_steps,
        groups_per_step=config.offline.batch_size,
        checkpoints=checkpoints,
        weights=_Unpushed(prepared, metrics),
        supervisor=Supervisor(
            training.watched, interval_s=config.supervision.interval_s, deadline_s=config.supervision.sign_timeout_s
        ),
        rollouts=training.rows,
        replay=training.rows,
        reference=NullReference(),  # the row stream has scored them
        learner=training.learner,
        evaluator=evaluator,
        metrics=metrics,
        stop=run.stop,
    )


@dataclass(frozen=True)
class _Unpushed(NoReceivers):
    """Updates the driver's metrics at the end of a step instead of pushing weights."""

    prepared: PreparedRows
    metrics: Metrics

    async def publish(self, version: int) -> int:
        self.metrics.observe(MetricName.MEDIA_BYTES_UNIQUE, self.prepared.media.num_bytes_unique)
        self.metrics.set_counts(CounterName.SKIPPED, count_by_reason(self.prepared.skipped))
        return version


async def _freeze_reference(prepared: PreparedRows, learner: LearnerGroup) -> None:
    if prepared.config.needs_reference:
        await learner.export(reference_folder(prepared.config))


def _record_result(metrics: Metrics, identity: Mapping[str, Any], version: int, values: Mapping[str, float]) -> None:
    _logger.info(
        "held-out rows at version %d: %s", version, ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    )
    metrics.observe(MetricName.HELD_OUT_LOSS, values[MetricName.LOSS])
    if MetricName.MARGIN in values:
        metrics.observe(MetricName.HELD_OUT_MARGIN, values[MetricName.MARGIN])
    accuracy, num_rows = min(values[MetricName.ACCURACY], 1.0), identity["num_prompts"]
    interval = wilson_interval(accuracy, num_rows)
    record = EvaluationRecord(version, accuracy, *interval, num_rows, values=dict(values), identity=identity)
    if not metrics.totals.has_evaluation(record):  # an earlier part of this run may have recorded it
        metrics.record_evaluation(record)
