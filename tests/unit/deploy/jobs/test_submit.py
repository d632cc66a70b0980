"""`mobula submit` checks a run here before anything is sent, and sends a command that resumes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mobula.cluster.errors import PreflightError
from mobula.configs.load import load_config
from mobula.configs.overrides import TASKS_VARIABLE, roots
from mobula.deploy.cli import app
from mobula.deploy.jobs import client
from mobula.deploy.jobs.client import JobSummary
from mobula.deploy.jobs.submit import Submission, check_package, entrypoint, runtime_env, submit
from mobula.deploy.run.node_network import relative_paths

WORDS = ["experiment=digits", "name=mine", "folder=/s/runs", "data.path=/s/data", "policy.model=/s/model"]
ASKED = Submission("disabled", None, (), "/env/bin/python", 90, None, {"HF_HOME": "/s/hf"})


class FakeJobs:
    """A cluster's jobs, by id and status."""

    def __init__(self, *jobs: JobSummary) -> None:
        self.jobs = list(jobs)
        self.sent: list[tuple] = []

    def all(self) -> list[JobSummary]:
        return self.jobs

    def submit(self, *args: object) -> None:
        self.sent.append(args)

    def wait_until_started(self, submission_id: str, timeout_s: float) -> None: ...


def job(submission_id: str, status: str, run: str = "mine") -> JobSummary:
    return JobSummary(submission_id, status, run, None, None, "")


def sent(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """The runtime environment of a job that the command line sends."""
    jobs = FakeJobs()
    monkeypatch.setattr(client, "Jobs", lambda address, auth: jobs)
    result = CliRunner().invoke(app, ["submit", "--address", "http://127.0.0.1:1", "--no-follow", *WORDS, *words])
    assert result.exit_code == 0, result.output
    [(_, _, env, _)] = jobs.sent
    return env


def test_what_is_sent_resumes_and_names_the_python_of_the_cluster() -> None:
    jobs = FakeJobs()
    assert submit(load_config(WORDS), WORDS, ASKED, jobs) == "mine"
    [(submission_id, command, env, metadata)] = jobs.sent
    assert (submission_id, metadata) == ("mine", {"run": "mine"})
    assert command == f"/env/bin/python -m mobula.deploy.cli train {' '.join(WORDS)} resume=auto"
    asked = {"RAY_AUTH_MODE": "disabled", "RAY_JOB_STOP_WAIT_TIME_S": "90", "NO_COLOR": "1", "HF_HOME": "/s/hf"}
    assert env["env_vars"] == asked


@pytest.mark.parametrize(
    ("more", "wait_s"), [((), "120"), (("timeouts.stop_checkpoint_s=300",), "360"), (("--stop-wait", "90"), "90")]
)
def test_a_stopped_job_has_the_time_to_write_its_checkpoint_and_to_close_its_roles(
    more: tuple[str, ...], wait_s: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sent(monkeypatch, *more)["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == wait_s


def test_directories_of_tasks_go_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    roots.cache_clear()
    monkeypatch.setenv(TASKS_VARIABLE, "mine")
    env = sent(monkeypatch)
    roots.cache_clear()
    assert (env["env_vars"][TASKS_VARIABLE], env["working_dir"]) == ("mine", str(tmp_path))


def test_words_are_quoted_and_a_named_resume_stands() -> None:
    command = entrypoint(["data.system_prompt=two words", "resume=never"], ASKED)
    assert command.endswith("'data.system_prompt=two words' resume=never")


def test_a_run_whose_job_is_over_gets_a_number_and_one_that_goes_on_is_refused() -> None:
    config = load_config(WORDS)
    over = FakeJobs(job("mine", "STOPPED"), job("mine-2", "FAILED"))
    assert submit(config, WORDS, ASKED, over) == "mine-3"
    for status in ("PENDING", "RUNNING"):
        with pytest.raises(PreflightError, match=r"goes on already, as job mine-2 .*mobula logs mine-2"):
            submit(config, WORDS, ASKED, FakeJobs(job("mine", "STOPPED"), job("mine-2", status)))
    named = Submission("disabled", None, (), "python", 90, "other")
    assert submit(config, WORDS, named, FakeJobs(job("mine", "STOPPED"))) == "other"
    with pytest.raises(PreflightError, match="there was a job other already"):
        submit(config, WORDS, named, FakeJobs(job("other", "SUCCEEDED", run="x")))


def test_relative_paths_are_refused_with_the_words_to_add() -> None:
    config = load_config(["experiment=digits"])
    assert set(relative_paths(config)) == {"folder", "data.path", "policy.model"}
    with pytest.raises(PreflightError, match=r"folder=runs.*e\.g\. folder=/SHARED/runs data\.path=/SHARED/"):
        submit(config, [], ASKED, FakeJobs())
    hub = load_config(["policy.model=org/name", "data.path=/s/data", "folder=/s/runs"])
    assert relative_paths(hub) == {}


def test_a_working_folder_that_is_too_large_names_its_largest_files(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "code").mkdir()
    for name, size in {"code/big.bin": 5000, "code/small.py": 10, "data.bin": 3000, "left_out.log": 10**6}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / ".gitignore").write_text("*.log\n")
    assert check_package(tmp_path, [], limit_bytes=10_000) < 9000
    with pytest.raises(PreflightError, match=r"3 files|4 files") as caught:
        check_package(tmp_path, [], limit_bytes=6000)
    message = str(caught.value)
    assert message.index("code/big.bin") < message.index("data.bin") < message.index("--exclude")
    assert "left_out.log" not in message
    assert check_package(tmp_path, ["/code/big.bin"], limit_bytes=6000) < 4000
    with pytest.raises(PreflightError, match="is no folder"):
        check_package(tmp_path / "missing", [])


def test_this_repository_can_be_sent() -> None:
    assert check_package(Path(__file__).parents[4], ["/runs", "/data"]) > 10**6


def test_the_working_folder_is_sent_without_runs_and_data(tmp_path: Path) -> None:
    env = runtime_env(Submission("token", tmp_path, ("*.bin",), "python", 90, None))
    assert env["working_dir"] == str(tmp_path)
    assert {"/runs", "/data", "*.bin"} <= set(env["excludes"])
    assert env["env_vars"]["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("command", [["list"], ["logs", "x"], ["stop", "x"], ["submit", *WORDS]])
def test_a_cluster_that_does_not_answer_is_named_at_once(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--address", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "no Ray dashboard answers at http://127.0.0.1:1" in result.stderr
    wrong = CliRunner().invoke(app, [*command, "--address", "127.0.0.1:8265"])
    assert wrong.exit_code == 2 and "write http://HOST:8265" in wrong.stderr


def test_the_version_is_shown() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout.startswith("mobula 0.")
