"""Results of lmms-eval as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mobula.cluster.errors import MobulaError

PRIMARY = ("anls", "relaxed_overall", "acc", "exact_match")  # the first of these that a task has is its headline


UNFILTERED = "none"


# The harness scores these in place of an answer that it did not get, as if the model had said them.
NO_ANSWER = ("[LMMS_EVAL_REQUEST_FAILED", "[LMMS_EVAL_BUDGET_EXCEEDED]")


class HarnessError(MobulaError):
    """The harness failed, or its results are missing or invalid."""


@dataclass(frozen=True)
class TaskSamples:
    """Figures from the samples of one task."""

    file: Path
    num: int
    num_empty: int  # answers without a visible character
    num_failed: int  # answers that the harness made up because it got none
    mean_output_tokens: float | None  # None where the harness counted none


@dataclass(frozen=True)
class TaskScore:
    """One task: `metrics` by name, `NAME,FILTER` where the harness filtered answers; `primary` is None without any."""

    task: str
    primary: str | None
    metrics: Mapping[str, float]
    stderr: Mapping[str, float]
    samples: TaskSamples

    @property
    def score(self) -> float | None:
        return None if self.primary is None else self.metrics[self.primary]


@dataclass(frozen=True)
class Results:
    """Results of one run; `groups` holds the rows that average over tasks."""

    file: Path
    tasks: tuple[TaskScore, ...]
    groups: Mapping[str, Mapping[str, float]]
    harness_seconds: float  # by the harness's own clock, from the load of the model to the last score

    @property
    def mean_primary_score(self) -> float | None:
        """The mean over tasks that have a score; None if no task has one."""
        scores = [task.score for task in self.tasks if task.score is not None]
        return sum(scores) / len(scores) if scores else None

    @property
    def num_samples(self) -> int:
        return sum(task.samples.num for task in self.tasks)

    @property
    def num_failed(self) -> int:
        return sum(task.samples.num_failed for task in self.tasks)


def read_results(folder: Path) -> Results:
    """The newest results below `folder`, with the samples written beside them."""
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
    tasks = tuple(_task(name, row, newest) for name, row in rows.items() if not members.get(name))
    if not tasks:
        raise HarnessError(f"{newest} holds no task: name tasks, or groups that have some")
    return Results(newest, tasks, groups, harness_seconds)


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


def _task(name: str, row: Mapping[str, Any], results: Path) -> TaskScore:
    values = numbers(row)
    stderr = {key: value for key, value in values.items() if "_stderr" in key.partition(",")[0]}
    metrics = {key: value for key, value in values.items() if key not in stderr}
    samples = results.with_name(f"{results.name.removesuffix('_results.json')}_samples_{name}.jsonl")
    return TaskScore(name, primary_metric(metrics), metrics, stderr, _samples(name, samples))


def _samples(task: str, path: Path) -> TaskSamples:
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
    return TaskSamples(path, num, num_empty, num_failed, sum(tokens) / len(tokens) if tokens else None)


def _texts(value: object) -> list[str]:
    """Flattens nested lists of texts: the harness unwraps single-element lists differently for each kind of task."""
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []
