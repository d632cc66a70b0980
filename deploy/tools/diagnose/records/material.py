"""Material: the records of a run, its configuration, data and model files, each read once when a check asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from mobula.cluster.errors import MobulaError
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.report.run_folder import RunFolder
from mobula.cluster.metrics.report.samples import AnswerGroup, KeptAnswer
from mobula.cluster.metrics.step_records import StepRecord
from mobula.configs.schema import RunConfig
from mobula.deploy.tools.diagnose.records.trends import Trend

if TYPE_CHECKING:
    from mobula.deploy.preflight.loaded import LoadedModel
    from mobula.deploy.tools.diagnose.records.survey import DataSurvey

RIGHT = 0.9  # accuracy from which a task counts as solved

SAMPLED: Mapping[str, str] = {
    MetricName.REWARD_MEAN: MetricName.SAMPLED_REWARD_MEAN,
    MetricName.ACCURACY: MetricName.SAMPLED_ACCURACY,
}


def nothing() -> None:
    """Reads nothing."""


@dataclass(frozen=True)
class Material:
    """What the checks read. `run` is None for a configuration without a run.

    `read_data` and `read_model` return None if the data or the files of the model are not on this machine.
    """

    config: RunConfig
    run: RunFolder | None = None
    read_data: Callable[[], DataSurvey | None] = field(default=nothing, repr=False)
    read_model: Callable[[], LoadedModel | None] = field(default=nothing, repr=False)

    @property
    def steps(self) -> list[StepRecord]:
        return list(self.run.steps) if self.run else []

    @property
    def answers(self) -> list[AnswerGroup]:
        """Drawn groups with text, by step."""
        return [group for group in self.run.samples.answers if group.answers] if self.run else []

    @cached_property
    def data(self) -> DataSurvey | None:
        return self.read_data()

    @cached_property
    def _model(self) -> tuple[LoadedModel | None, str]:
        try:
            return self.read_model(), ""
        except (MobulaError, ValueError, OSError) as error:  # the user's mistakes, by whichever part finds them
            return None, str(error)

    @property
    def model(self) -> LoadedModel | None:
        return self._model[0]

    @property
    def model_problem(self) -> str:
        """Why the files of the model cannot be used; empty if they can, or are not on this machine."""
        return self._model[1]

    def series(self, name: str) -> list[float]:
        """Returns the finite values of a metric, in the order of the steps. Reward and accuracy are means over all
        sampled responses: a filter chooses trained groups by their rewards."""
        names = (SAMPLED.get(name, name), name)
        found = [next((step.values[n] for n in names if n in step.values), math.nan) for step in self.steps]
        return [value for value in found if math.isfinite(value)]

    def component(self, name: str) -> list[float]:
        return [step.components[name] for step in self.steps if name in step.components]

    def trend(self, name: str) -> Trend | None:
        return Trend.of(self.series(name))

    def late(self, name: str) -> float | None:
        """Returns the mean of a metric over the last quarter of the steps; None without values."""
        values = self.series(name)
        return mean(values[-max(1, len(values) // 4) :]) if values else None

    def early(self, name: str) -> float | None:
        """Returns the mean of a metric over the first quarter of the steps; None without values."""
        values = self.series(name)
        return mean(values[: max(1, len(values) // 4)]) if values else None

    def count(self, name: CounterName) -> dict[str, int]:
        """Returns reason -> count at the newest step."""
        counters = self.steps[-1].counters if self.steps else {}
        return dict(counters[name]) if name in counters else {}

    def late_count(self, name: CounterName) -> dict[str, int]:
        """Returns reason -> count over the last quarter of the steps."""
        if not self.steps:
            return {}
        before = self.steps[-max(1, len(self.steps) // 4) - 1 :][0].counters if len(self.steps) > 1 else {}
        earlier = before[name] if name in before else {}
        return {reason: num - earlier.get(reason, 0) for reason, num in self.count(name).items()}

    @property
    def num_late_samples(self) -> int:
        """Trained responses of the last quarter of the steps."""
        late = self.steps[-max(1, len(self.steps) // 4) :]
        return int(sum(step.values[MetricName.NUM_SAMPLES] for step in late))

    @property
    def num_samples(self) -> int:
        return int(sum(step.values[MetricName.NUM_SAMPLES] for step in self.steps))

    @cached_property
    def is_solved(self) -> bool:
        """Whether the accuracy of the last quarter is at least `RIGHT`."""
        accuracy = self.late(MetricName.ACCURACY)
        return accuracy is not None and accuracy >= RIGHT

    @cached_property
    def is_learning(self) -> bool:
        """Whether the reward rises, or the task is solved."""
        reward = self.trend(MetricName.REWARD_MEAN)
        return self.is_solved or (reward is not None and reward.rises)

    @property
    def kept_answers(self) -> list[KeptAnswer]:
        return [answer for group in self.answers for answer in group.answers]


def mean(values: list[float]) -> float:
    """Returns the mean of a non-empty list."""
    return math.fsum(values) / len(values)
