"""`mobula train` on parts of the user's: code, checkpoints, data, and a judge in a worker pool of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_judge
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import RUN_DEADLINE_S, SMALL, Job, marked, none_left
from tiny_checkpoints import write_text_policy

from mobula.cluster.workers.faults import FAULTS_FILE, read_faults
from mobula.configs.load import load_resolved
from mobula.examples.digits.digits import write_digits
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_STEPS = 2

CODE = """
from dataclasses import replace

import torch
from mobula.actors.datasets.formats.base import Draft
from mobula.actors.datasets.rows import Turn
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.samplers.huggingface import HuggingFaceSampler
from mobula.cluster.metrics.definitions import MetricName
from mobula.learner.algorithms.policy_losses import PolicyLoss

from sizes import SCALE


def row(record, *, sign):
    left, right = record["left"], record["right"]
    return Draft([Turn("user", f"{left} {sign} {right} = ?")], str(left + right))


class Reminding(ChatProcessor):
    def prepare(self, row, prompt_id):
        return super().prepare(replace(row, question=row.question + " Be brief."), prompt_id)


class Sampler(HuggingFaceSampler):
    async def sample(self, prompt, media, settings, attempt, emit):
        assert "Be brief." in prompt.text and "+" in prompt.text
        return await super().sample(prompt, media, settings, attempt, emit)


def odd(request, *, bonus):
    return bonus * (len(request.response.text) % 2)


def centred(rewards, options):
    values = torch.zeros_like(rewards.values)
    for group in rewards.group_ids.unique():
        members = rewards.group_ids == group
        values[members] = rewards.values[members] - rewards.values[members].mean()
    return values


def reinforce(logprobs, old_logprobs, advantages, mask, *, scale=SCALE):
    ratio = (logprobs - old_logprobs).exp().detach()
    return PolicyLoss(-scale * advantages * logprobs, ratio, torch.zeros_like(mask))


class Lines:
    name = "lines"

    def __init__(self, run):
        self._file = (run.folder / "lines.txt").open("a", buffering=1)

    def emit(self, record):
        self._file.write(f"{record.step} {record.values[MetricName.REWARD_MEAN]}\\n")

    def emit_evaluation(self, record):
        pass

    def close(self):
        self._file.close()
"""

WORDS = (
    "experiment=own", "resources=laptop_overlapped", "learner=single", "data.row_format=own.py:row",
    "data.row_format_options.sign=+", "data.processor=own.py:Reminding.of", "sampler.kind=own.py:Sampler",
    "rewards=own", "rewards.components.0.function=own.py:odd", "rewards.components.0.options={bonus: 2}",
    "algorithm.advantage=own.py:centred", "algorithm.loss=own.py:reinforce", "metrics.trackers=[own.py:Lines]",
    "warm_start.num_steps=0", "sampler.max_tokens=12", f"num_steps={NUM_STEPS}",
)  # fmt: skip


def test_a_run_of_relative_files_in_a_directory_outside_of_the_repository(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "own.py").write_text(CODE)
    (project / "sizes.py").write_text("SCALE = 0.5\n")
    rows = [{"left": n, "right": n % 7} for n in range(20)]
    for split in ("train", "validation", "test"):
        (project / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_text_policy(tmp_path / "model", "qwen3")
    with Job(tmp_path, (*WORDS, f"data.path={project}"), directory=project) as job:
        job.trained(NUM_STEPS)
    lines = [line.split() for line in (job.run_folder / "lines.txt").read_text().splitlines()]
    assert [line[0] for line in lines] == ["1", "2"] and all(0 <= float(line[1]) <= 2 for line in lines)


def write_sums(folder: Path) -> Path:
    """Questions without images, in every split."""
    folder.mkdir()
    rows = [{"question": f"What is the sum of {n} and {n % 7}?", "answer": n + n % 7} for n in range(20)]
    lines = [json.dumps(row) + "\n" for row in rows]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def test_a_text_model_of_ones_own_trains_on_the_settings_for_released_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "mein Übungslauf, a=b"
    folder.mkdir()
    write_text_policy(folder / "model", "qwen3")
    words = ("experiment=own", "resources=laptop_overlapped", "learner=single", "num_steps=4")
    with Job(
        folder, (*words, f"data.path={write_sums(folder / 'sums')}", "sampler.max_tokens=40", "warm_start.num_steps=0")
    ) as job:
        found = job.trained(4)
    config = load_resolved(job.run_folder / "config.yaml")
    assert (config.learner.learning_rate, config.warm_start.num_steps, config.needs_reference) == (1e-6, 0, False)
    assert found.summary.logprob_gap_mean < 1e-5 and found.summary.logprob_gap_max < 1e-3
    log = (job.run_folder / "run.log").read_text(encoding="utf-8")
    assert "(qwen3, " in log and "nothing frozen" in log
    assert log.index("this run:") < log.index("left for 1 steps")
    assert " before RL, " in job.output


def verl_record(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """A row of digits in verl's schema."""
    paths = row["image"] if isinstance(row["image"], list) else [row["image"]]
    return {
        "prompt": [{"role": "user", "content": row["question"]}],
        "images": [{"bytes": (folder / path).read_bytes(), "path": path} for path in paths],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"id": row["id"]},
    }


def test_parquet_with_images_is_trained_on(tmp_path: Path) -> None:
    digits, data = write_digits(tmp_path / "digits", task="digit_sum"), tmp_path / "verl"
    data.mkdir()
    for split in ("train", "test"):
        records = [verl_record(digits, json.loads(line)) for line in (digits / f"{split}.jsonl").open()]
        pq.write_table(pa.Table.from_pylist(records), data / f"{split}.parquet", row_group_size=100)
    words = ("experiment=digits", "data=verl", f"data.path={data}", "data.splits={validation: test}")
    few = ("resources=laptop_overlapped", "learner=single", f"num_steps={NUM_STEPS}", "sampler.max_tokens=8")
    apart = ("resources.processor.num_workers=1", "resources.processor.num_cpus=0.1")
    with Job(tmp_path, (*words, *few, *apart, "warm_start.num_steps=0")) as job:
        found = job.trained(NUM_STEPS)
    assert pq.ParquetFile(data / "train.parquet").num_row_groups > 1
    assert found.summary.logprob_gap_mean < 1e-5
    assert found.summary.media_bytes_unique > 0 and not found.skipped


NUM_JUDGED_STEPS, KILL_AFTER, WEIGHT = 8, 2, 0.25

WORKERS = {
    "num_workers": 1, "num_cpus": 0.1, "num_gpus": 0, "num_threads": 1, "bind_cores": True, "first_core": 1,
    "custom_resources": {}, "node_labels": {}, "strategy": "auto",
}  # fmt: skip


def component(name: str, function: str, weight: float, options: dict[str, Any], **fields: Any) -> dict[str, Any]:
    rest = {"service": "reward", "needs_images": False, "retries": 0, "cache_entries": 0, **fields}
    return {"name": name, "function": function, "weight": weight, "options": options, **rest}


def word(value: Any) -> str:
    """As the command line takes it: keys without quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {word(part)}" for key, part in value.items()) + "}"
    return "[" + ", ".join(map(word, value)) + "]" if isinstance(value, list) else json.dumps(value)


def job_with(folder: Path, judge: Path) -> Job:
    """Two components: the length of the answer, and the judge's choice of a digit with the image before it."""
    own = {"model": str(judge), "temperature": 1.0, "verdict": "regex:Score: (?P<score>[0-9])"}
    options = {**engine_judge.OPTIONS, **own}
    components = [
        component("odd", "job_reward:score", 1.0, {}),
        component("judge", "vllm_judge", WEIGHT, options, service="judge", needs_images=True),
    ]
    words = ("experiment=digits", "resources=laptop", "learner=single", f"data.path={folder / 'digits'}")
    words += ("resources.rollout.num_workers=1", "resources.learner.num_workers=1", f"num_steps={NUM_JUDGED_STEPS}")
    words += (f"rewards.components={word(components)}", "rewards.accuracy_component=odd")
    words += (f"resources.reward_services={word({'judge': WORKERS})}", "supervision.backoff_s=0.1")
    small = tuple(word for word in SMALL if not word.startswith("rewards."))
    write_tiny_qwen2_5_vl(folder / "model")
    return Job(folder, words, small=small)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with job_with(tmp_path, write_tiny_qwen2_5_vl(tmp_path / "judge", seed=1)) as job:
        yield job


def judge_process(job: Job) -> int:
    """The newest process of the judge's worker."""
    log = (job.run_folder / "logs" / "reward.judge-0.log").read_text()
    return int(log.rpartition("===== process ")[2].split()[0])


@pytest.mark.matrix
def test_a_judge_scores_every_response_and_its_killed_worker_costs_none(job: Job) -> None:
    run = job.start()
    job.reach(run, KILL_AFTER)
    killed = judge_process(job)
    assert killed in marked(job.marks[0])
    os.kill(killed, signal.SIGKILL)
    job.finish(run)
    found = job.done(NUM_JUDGED_STEPS)
    judged = [step.components["judge"] for step in found.steps]
    assert len(judged) == NUM_JUDGED_STEPS and all(1 < value < 5 for value in judged), judged
    for step in found.steps:
        expected = step.components["odd"] + WEIGHT * step.components["judge"]
        assert step.values["reward_mean"] == pytest.approx(expected, abs=1e-6)
    failures = found.steps[-1].counters["reward_failures"]
    assert {kind: number for kind, number in failures.items() if number} == {"worker_died": 1}
    assert [fault.worker for fault in read_faults(job.run_folder / FAULTS_FILE)] == ["reward.judge/0"]
    assert judge_process(job) != killed
    none_left(job.marks[0])


@pytest.mark.matrix
def test_a_judge_that_cannot_be_loaded_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    with job_with(tmp_path, tmp_path / "nothing") as job:
        assert job.start().wait(RUN_DEADLINE_S) != 0
        assert "a reward.judge worker cannot be started" in job.output, job.output
        assert "rewards.components[judge]: options.model=" in job.output and "cannot be loaded" in job.output
        none_left(job.marks[0])
