"""Runs that are stopped by a signal: each leaves a checkpoint of its last version and repeats no step after it."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fakes import FakeMetrics, FakeStep
from jobs import BARE, GONE_DEADLINE_S, MOBULA, RUN_DEADLINE_S, SMALL, Job, none_left
from offline_rows import conversation, write_digit_rows
from safetensors.torch import load_file
from small_cluster import Shape, SmallRun
from test_faults import expected

from mobula.cluster.errors import RunStopped
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.recovery.checkpoints import newest_learner_state

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(2400)]

INTERRUPTED = 130

RARELY = "checkpoints.interval_steps=1000"

RL = (
    "experiment=digits", "resources=laptop", "sampler=huggingface", "sampler.max_tokens=8",
    "algorithm.max_staleness=0", "resources.rollout.num_workers=1", "resources.learner.num_workers=1",
    "learner=single", "num_steps=12", "resume=auto", RARELY,
)  # fmt: skip

SFT_WORDS = (
    "policy=tiny_qwen2_5_vl", "learner=single", "resources.learner.num_workers=1",
    "learner.activation_checkpointing=none", "offline.max_tokens=256", "evaluation.interval_steps=0", "resume=auto",
)  # fmt: skip
LONG_SFT = (
    *SFT_WORDS, "learner.learning_rate=0.003", "learner.warmup_steps=0", "offline.batch_size=16",
    "evaluation.num_prompts=40", "num_steps=60", RARELY,
)  # fmt: skip
SHORT_SFT = (*SFT_WORDS, "offline.batch_size=4", "evaluation.num_prompts=8")
SFT = (*MOBULA, "sft")


def two_jobs(folder: Path, words: tuple[str, ...], small: tuple[str, ...]) -> list[Job]:
    for name in ("stopped", "whole"):
        (folder / name).mkdir()
    return [Job(folder / name, words, small) for name in ("stopped", "whole")]


def stop_after(job: Job, num_steps: int, *command: str) -> int:
    """Start it, send it SIGTERM after so many steps, and return the version that it has reached."""
    process = job.start(*command)
    job.reach(process, num_steps)
    process.send_signal(signal.SIGTERM)
    assert process.wait(GONE_DEADLINE_S) == INTERRUPTED, job.output
    none_left(job.marks[-1])
    summary = read_run_folder(job.run_folder).summary
    assert summary.status == "stopped"
    newest = newest_learner_state(job.run_folder / "checkpoints")
    assert newest[0] == summary.version == job.steps[-1]
    return summary.version


def weights(job: Job) -> dict[str, torch.Tensor]:
    return load_file(job.run_folder / "policy" / "model.safetensors")


def assert_as_if_never_stopped(stopped: Job, whole: Job) -> None:
    ours, theirs = read_run_folder(stopped.run_folder), read_run_folder(whole.run_folder)
    assert [step.step for step in ours.steps] == [step.step for step in theirs.steps]
    assert [step.values["loss"] for step in ours.steps] == [step.values["loss"] for step in theirs.steps]
    assert [e.version for e in ours.evaluations] == [e.version for e in theirs.evaluations]
    assert ours.summary.status == "done"
    found, expected = weights(stopped), weights(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_goes_on_from_the_checkpoint_of_its_stop_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    stopped, whole = two_jobs(tmp_path, (*RL, f"data.path={tmp_path / 'digits'}"), SMALL)
    with stopped, whole:
        version = stop_after(stopped, 2)
        assert 2 <= version < 12
        log = (stopped.run_folder / "run.log").read_text()
        assert "stopping: waiting for " in log and f"checkpoint of step {version}: " in log
        stopped.finish(stopped.start())
        log = (stopped.run_folder / "run.log").read_text()
        assert f"recovered from version {version} to {version} by the journal;" in log
        recovered = read_run_folder(stopped.run_folder).steps[-1].counters["recovered"]
        assert recovered["steps"] == 0 and recovered.keys() <= {"steps", "groups"}, "nothing was lost"
        whole.finish(whole.start())
        assert_as_if_never_stopped(stopped, whole)


def test_an_offline_job_goes_on_from_the_checkpoint_of_its_stop(tmp_path: Path) -> None:
    """It has no journal: what it keeps of its steps is the checkpoint alone."""
    (tmp_path / "rows").mkdir()
    write_digit_rows(tmp_path / "rows", tmp_path / "digits", conversation, train=200, validation=60)
    stopped, whole = two_jobs(tmp_path, (*LONG_SFT, f"data.path={tmp_path / 'rows'}"), BARE)
    with stopped, whole:
        version = stop_after(stopped, 5, *SFT)
        assert 5 <= version < 60
        stopped.finish(stopped.start(*SFT))
        whole.finish(whole.start(*SFT))
        assert_as_if_never_stopped(stopped, whole)


class AskedIn(FakeMetrics):
    """Calls `ask` in one phase of one step."""

    def __init__(self, step: int, phase: str) -> None:
        super().__init__()
        self.results: list[bool] = []
        self.run: SmallRun | None = None
        self._at = (step, phase)

    @contextmanager
    def step(self, step: int) -> Iterator[FakeStep]:
        with super().step(step) as scope:
            timed = scope.timed

            @contextmanager
            def watched(phase: str) -> Iterator[None]:
                with timed(phase):
                    if (step, phase) == self._at and self.run is not None:
                        asyncio.get_running_loop().call_soon(lambda: self.results.append(self.run.stop.request()))
                    yield

            scope.timed = watched
            yield scope


def test_small_roles_are_stopped_in_every_phase_and_train_each_group_once(tmp_path: Path, local_ray: str) -> None:
    reached = 0
    for step, phase in ((2, "wait_for_rollouts"), (3, "update"), (5, "weight_sync"), (6, "reference")):
        asked = AskedIn(step, phase)
        shape = Shape(total_steps=8, num_engines=1, num_rewards=1, checkpoint_interval=1000)
        asked.run = SmallRun(tmp_path, shape, metrics=asked)
        with pytest.raises(RunStopped):
            asyncio.run(asked.run.go())
        assert asked.results == [True]
        assert list(asked.steps)[0] == reached + 1, "no step is repeated"
        reached = step - 1 if phase == "wait_for_rollouts" else step
        newest = newest_learner_state(tmp_path / "checkpoints")
        assert newest[0] == reached
    run = SmallRun(tmp_path, Shape(total_steps=8, num_engines=1, num_rewards=1))
    assert asyncio.run(run.go()) == 8
    assert [sorted(step) for step in run.trained] == [sorted(step) for step in expected(8)]


PROXY = "http://127.0.0.1:9"  # where nothing listens

SURROUNDINGS = {
    "a long TMPDIR": "TMPDIR={folder}/" + "d" * 90,
    "an odd TMPDIR": "'TMPDIR={folder}/a \u00e9 b'",
    "no HOME": "-u HOME",
    "a HOME that cannot be written": "HOME=/proc/nowhere",
    "an ASCII locale": "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 COLUMNS=1",
    "proxies": f"HTTP_PROXY={PROXY} http_proxy={PROXY} HTTPS_PROXY={PROXY} ALL_PROXY=socks5://127.0.0.1:9",
}


def job_of(tmp_path: Path, num_steps: int) -> Job:
    (tmp_path / "rows").mkdir()
    write_digit_rows(tmp_path / "rows", tmp_path / "digits", conversation, train=40, validation=8)
    return Job(tmp_path, (*SHORT_SFT, f"data.path={tmp_path / 'rows'}", f"num_steps={num_steps}"), BARE)


def test_a_second_start_is_refused_and_a_hangup_ends_the_first_in_order(tmp_path: Path, usual_signals: None) -> None:
    with job_of(tmp_path, 5000) as job:
        first = job.start(*SFT)
        job.reach(first, 2)
        assert job.start(*SFT).wait(RUN_DEADLINE_S) == 2
        assert f"is in use by process {first.pid} on" in job.output
        for _ in range(2):  # the kernel sends one, and the shell another
            first.send_signal(signal.SIGHUP)
        assert first.wait(GONE_DEADLINE_S) == 130, job.output
        none_left(job.marks[0])
        newest, summary = newest_learner_state(job.run_folder / "checkpoints"), read_run_folder(job.run_folder).summary
        assert newest[0] == job.steps[-1]
        assert summary.status == "stopped"
        assert not (job.run_folder / "run.lock").exists()


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_run_goes_on_in_odd_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surroundings: str) -> None:
    words = shlex.split(SURROUNDINGS[surroundings].format(folder=tmp_path))
    for word in words:
        name, is_set, value = word.partition("=")
        if is_set:
            monkeypatch.setenv(name, value)
        elif name != "-u":
            monkeypatch.delenv(name, raising=False)
    if "TMPDIR" in words[0]:
        Path(os.environ["TMPDIR"]).mkdir()
    with job_of(tmp_path, 1) as job:
        job.finish(job.start(*SFT))


@pytest.mark.parametrize("name", ["actors", "cluster", "configs", "learner", "rewards"])
def test_a_run_works_beside_a_file_with_the_name_of_a_package(tmp_path: Path, name: str) -> None:
    job = job_of(tmp_path, 1)
    (tmp_path / f"{name}.py").write_text("raise SystemExit('the module of the user')")  # on the PYTHONPATH
    with job:
        job.finish(job.start(*SFT))
