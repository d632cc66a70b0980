"""A real run, and one that reproduces it and is killed on the way: both audits hold, and the weights are bit-equal."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import REPEATABLE, RUN_DEADLINE_S, Job
from runs import audited
from waiting import wait_until

from mobula.cluster.audit.chain import AUDIT_FILE, HEAD_FILE, is_growing, recorded_files
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.recovery.checkpoints import learner_state_of
from mobula.deploy.report.audit import compared_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_STEPS = 4
WORDS = (*REPEATABLE, "learner.learning_rate=5e-4", f"num_steps={NUM_STEPS}")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("audited")
    with Job(folder, (*WORDS, f"data.path={folder / 'digits'}")) as job:
        job.finish(job.start())
        yield job


@pytest.fixture(scope="module")
def again(job: Job) -> Path:
    """The run again; its driver is killed after three steps, and the same command continues."""
    words = ("train", f"reproduce={job.run_folder}", "name=again", "resume=auto")
    folder = job.run_folder.with_name("again")
    killed = job.start_command(*words)
    wait_until(
        lambda: len(read_records(folder / "metrics.jsonl")) > 3 or killed.poll() is not None,  # one is an evaluation
        RUN_DEADLINE_S,
        lambda: job.output,
    )
    killed.kill()
    killed.wait()
    job.finish(job.start_command(*words))
    return folder


def test_files_of_a_run_are_for_their_owner_alone(job: Job, again: Path) -> None:
    """The processes of the run have the usual umask, 022; one run was killed and resumed."""
    for folder in (job.run_folder, again):
        found = {str(path.relative_to(folder)): path.lstat().st_mode & 0o7777 for path in folder.rglob("*")}
        assert {"run.log", "metrics.jsonl", "audit.jsonl", "report.html", "config.yaml", "summary.json"} <= set(found)
        assert any(name.startswith("logs/") for name in found) and any(".safetensors" in name for name in found)
        assert {name: f"{mode:o}" for name, mode in found.items() if mode not in (0o600, 0o700)} == {}
        assert folder.stat().st_mode & 0o7777 == 0o700


def test_a_run_proves_its_steps_pushes_and_checkpoints(job: Job) -> None:
    result = audited(job.run_folder)
    assert result.findings == []
    history = result.history
    assert (history.version, [part.status for part in history.parts]) == (NUM_STEPS, ["done"])
    assert {engine: sum(counts.values()) for engine, counts in history.receipts.items()} == {
        "rollout/0": NUM_STEPS + 1, "rollout/1": NUM_STEPS + 1,
    }  # fmt: skip
    assert history.descent(NUM_STEPS).steps == (3, 4)
    assert sorted(history.logged) == [1, 2, 3, 4]


def test_a_killed_run_that_reproduces_another_ends_with_equal_weights(job: Job, again: Path) -> None:
    """The comparison of the audit and the bytes of the policies agree."""
    job.finish(job.start_command("audit", "--run", str(again), "--json"))
    found = json.loads("{" + job.output.rpartition("\n{")[2])
    assert found["findings"] == []
    assert [part["status"] for part in found["parts"]] == [None, "done"]
    assert found["parts"][1]["resumed_from"] in (0, 2)
    assert found["parts"][0]["provenance"]["reproduces"]["differences"] == {}
    compared = {key: value for key, value in found["reproduces"].items() if key != "run"}
    assert compared == {
        "equal_to": NUM_STEPS, "num_shared": NUM_STEPS, "first_difference": "", "has_equal_policy": True,
    }  # fmt: skip
    policy = Path("policy") / "model.safetensors"
    assert (again / policy).read_bytes() == (job.run_folder / policy).read_bytes()


def test_a_flipped_bit_in_a_file_of_a_real_run_is_found(again: Path) -> None:
    checkpoints = [path for path in (again / "checkpoints").rglob("*") if path.is_file()]
    logged = (again / "trajectories").glob("*.parquet")
    whole = [path for path in recorded_files(again) if not is_growing(str(path.relative_to(again)))]
    files = [again / AUDIT_FILE, again / HEAD_FILE, *whole, *checkpoints, *logged]
    rng = random.Random(0)
    for path in (path for path in files if path.stat().st_size):
        content = path.read_bytes()
        altered = bytearray(content)
        altered[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(altered)
        findings = audited(again).findings
        path.write_bytes(content)
        assert any(str(path.relative_to(again)).startswith(finding.file) for finding in findings), path
    assert audited(again).findings == []


def test_checkpoints_hold_the_weights_that_were_pushed(job: Job, again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (job.run_folder, again):
        job.finish(job.start_command("audit", "--run", str(folder), "--json", "--weights"))
        found = json.loads("{" + job.output.rpartition("\n{")[2])
        assert (found["findings"], found["weights_compared"]) == ([], [0, 2, 4])
    pushed, of_again = (
        {record.body["version"]: record.body["weights"] for record in audited(folder).history.pushes}
        for folder in (job.run_folder, again)
    )
    assert pushed == of_again and len({pushed[0], pushed[2], pushed[4]}) == 3
    exchanged = {2: 4, 4: 2}
    monkeypatch.setattr(
        "mobula.deploy.report.audit.learner_state_of",
        lambda folder, version: learner_state_of(folder, exchanged.get(version, version)),
    )
    compared = compared_weights(audited(again).history, again)
    assert [version for version, difference in compared.items() if "has other weights" in difference] == [2, 4]
