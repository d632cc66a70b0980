"""The main job on answers of several sentences that differ in length: a warm start, a few steps of RL, evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Job, none_left

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.examples.digits.digits import write_digits

pytestmark = [pytest.mark.load, pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_STEPS = 3
MAX_IMAGES = 2
SMALL = (
    # Enough to write the sentences; the digits in them are still right by chance.
    "warm_start.num_steps=50",
    "warm_start.batch_size=16",
    "warm_start.check_interval=50",
    "warm_start.max_checks_rows=8",
    "evaluation.num_prompts=32",
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=8",
    "algorithm.max_concurrent_groups=8",
    "resources.object_store_bytes=268435456",
    "metrics.progress=false",
    "timeouts.start_s=500",
)


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("lists")
    words = ("experiment=digit_list", "resources=laptop", f"data.path={short_lists(folder / 'data')}")
    with Job(folder, (*words, "data.kind=jsonl", f"num_steps={NUM_STEPS}"), small=SMALL) as job:
        job.finish(job.start())
        yield job


def short_lists(folder: Path) -> Path:
    """Only the questions on one or two images."""
    write_digits(folder, task="digit_list")
    for split in ("train", "validation", "test"):
        lines = (folder / f"{split}.jsonl").read_text().splitlines(keepends=True)
        short = [line for line in lines if len(json.loads(line)["image"]) <= MAX_IMAGES]
        (folder / f"{split}.jsonl").write_text("".join(short))
    return folder


@pytest.fixture(scope="module")
def found(lists: Job) -> RunFolder:
    return read_run_folder(lists.run_folder)


def test_the_warm_start_teaches_the_sentences_and_their_reward_is_partial(found: RunFolder) -> None:
    """An answer without the right sentences scores 0; with digits at random in them it scores about a tenth."""
    assert found.summary is not None
    assert (found.summary.status, found.summary.version, found.faults) == ("done", NUM_STEPS, [])
    assert found.summary.accuracy_before is not None
    assert 0.03 < found.summary.accuracy_before < 1
    assert any(0 < sample.reward < 1 for sample in found.samples.samples)


def test_answers_end_and_differ_in_length(found: RunFolder) -> None:
    """24 or 25 tokens on one image, 40 or 41 on two."""
    ended = {sample.num_tokens for sample in found.samples.samples if sample.finish_reason == "stop"}
    assert ended & {24, 25}
    assert ended & {40, 41}


def test_engine_and_learner_agree_on_every_token_of_long_answers(found: RunFolder) -> None:
    assert found.summary is not None
    assert found.summary.logprob_gap_mean <= 1e-5
    assert 0 < found.summary.logprob_gap_max <= 1e-3


def test_no_process_is_left(lists: Job) -> None:
    none_left(lists.marks[0])
