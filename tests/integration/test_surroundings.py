"""A small offline job in surroundings that users have: started twice, hung up, with an odd environment."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest
from jobs import GONE_DEADLINE_S, RUN_DEADLINE_S, Job, none_left
from offline_data import conversation, write_rows
from waiting import wait_until

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.recovery.checkpoints import newest_learner_state

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(2400)]

SFT = ("-m", "mobula.deploy.cli", "sft")
WORDS = (
    "policy=tiny_qwen2_5_vl", "learner=single", "resources.learner.num_workers=1",
    "learner.activation_checkpointing=none", "offline.max_tokens=256", "offline.batch_size=4",
    "evaluation.num_prompts=8", "evaluation.interval_steps=0", "resume=auto",
)  # fmt: skip
SMALL = ("metrics.progress=false", "resources.object_store_bytes=268435456", "timeouts.start_s=500")
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
    write_rows(tmp_path / "rows", tmp_path / "digits", conversation, train=40, validation=8)
    return Job(tmp_path, (*WORDS, f"data.path={tmp_path / 'rows'}", f"num_steps={num_steps}"), small=SMALL)


def test_a_second_start_is_refused_and_a_hangup_ends_the_first_in_order(tmp_path: Path) -> None:
    with job_of(tmp_path, 5000) as job:
        first = job.start(*SFT)
        wait_until(lambda: len(job.steps) >= 2 or first.poll() is not None, RUN_DEADLINE_S, lambda: job.output)
        assert job.start(*SFT).wait(RUN_DEADLINE_S) == 2
        assert f"is in use by process {first.pid} on" in job.output
        for _ in range(2):  # the kernel sends one, and the shell another
            first.send_signal(signal.SIGHUP)
        assert first.wait(GONE_DEADLINE_S) == 130, job.output
        none_left(job.marks[0])
        newest, summary = newest_learner_state(job.run_folder / "checkpoints"), read_run_folder(job.run_folder).summary
        assert newest is not None and newest[0] == job.steps[-1]
        assert summary is not None and summary.status == "stopped"
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
