"""A run whose loss, advantage, reward, rows, processor, sampler and sink are files in a directory of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Job
from tiny_text_models import write_text_policy

from mobula.cluster.metrics.report.run_folder import read_run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
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
        job.finish(job.start())
    summary = read_run_folder(job.run_folder).summary
    assert (summary.status, summary.version) == ("done", NUM_STEPS)
    lines = [line.split() for line in (job.run_folder / "lines.txt").read_text().splitlines()]
    assert [line[0] for line in lines] == ["1", "2"] and all(0 <= float(line[1]) <= 2 for line in lines)
