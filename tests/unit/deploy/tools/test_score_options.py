"""`mobula replay`, `compare`, `audit` and `serve-rewards`: what they print, and what they refuse."""

from __future__ import annotations

import io
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import make_group, make_prompt
from metrics_data import write_run
from runs import whole_run
from safetensors.torch import save_file
from typer.testing import CliRunner

from mobula.cluster.errors import PreflightError
from mobula.cluster.proxies import is_loopback
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.serving import Address, read_token
from mobula.configs.load import ConfigError, load_config
from mobula.deploy.cli import app
from mobula.deploy.data import replay as command
from mobula.deploy.host.terminal import PlainConsole
from mobula.deploy.report.audit import audit
from mobula.deploy.serve.servers import serve_rewards
from mobula.deploy.wiring.persistence import trajectory_log

CONFIG = load_config(["experiment=digits"])


def record(folder: Path, *rewards: Reward | None) -> None:
    """One step of one group; the second answer is the right one."""
    group = make_group(replace(make_prompt("0/0/s0"), references=("answer of 0/0/s0#1",)))
    trajectory_log(folder, CONFIG).append(1, [ScoredGroup(group.summary(), group, rewards)])


def test_a_run_without_a_log_or_without_its_version_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"replay\.trajectory_log=true"):
        command.replay(tmp_path, CONFIG)
    record(tmp_path, Reward(1.0, {}), None)
    with pytest.raises(PreflightError, match=r"step-000000 is missing"):
        command.replay(tmp_path, CONFIG)


def test_a_damaged_log_is_refused_before_anything_starts(tmp_path: Path) -> None:
    record(tmp_path, Reward(1.0, {}), None)
    [path] = trajectory_log(tmp_path, CONFIG).folder.glob("*.parquet")
    path.write_bytes(b"PAR1")
    with pytest.raises(PreflightError, match=r"step-000001\.parquet is no record of a step"):
        command.replay(tmp_path, CONFIG)


def test_weights_are_compared_over_all_files_of_a_checkpoint(tmp_path: Path) -> None:
    def write(name: str, **tensors: torch.Tensor) -> Path:
        (tmp_path / name).mkdir()
        for key, tensor in tensors.items():
            save_file({key: tensor}, tmp_path / name / f"{key}.safetensors")
        return tmp_path / name

    one = write("one", a=torch.ones(2), b=torch.ones(3))
    assert command.largest_difference(one, write("same", a=torch.ones(2), b=torch.ones(3))) == 0
    assert command.largest_difference(one, write("other", a=torch.ones(2), b=torch.full((3,), 1.5))) == 0.5
    assert command.largest_difference(one, write("fewer", a=torch.ones(2))) == float("inf")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("compared")
    for seed in (1, 2):
        write_run(folder / f"seed{seed}", num_steps=6, seed=seed)
    return [folder / "seed1", folder / "seed2"]


def test_seeds_of_one_setting_are_one_line_of_the_page_and_of_the_table(runs: list[Path], tmp_path: Path) -> None:
    page, table = tmp_path / "page.html", tmp_path / "table.json"
    words = ["compare", f"grpo={runs[0]},{runs[1]}", str(runs[0]), "--output", str(page), "--json", str(table)]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert [(row["label"], row["num_runs"]) for row in json.loads(table.read_text())] == [("grpo", 2), ("seed1", 1)]
    assert "grpo" in page.read_text() and str(page) in found.output.replace("\n", "")


@pytest.mark.parametrize(
    ("word", "message"),
    [("nowhere", "there is no run in nowhere"), ("grpo=", "names no run: give [LABEL=]RUN[,RUN...]")],
)
def test_a_run_that_is_not_there_is_named(word: str, message: str) -> None:
    found = CliRunner().invoke(app, ["compare", word])
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())


REWARDS = """
components:
  - {name: a, function: format, weight: 1.0, options: {preset: boxed}}
accuracy_component: a
"""


def test_a_token_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    monkeypatch.setenv("A_TOKEN", "from-env")
    assert read_token("A_TOKEN", None) == "from-env"
    assert read_token(None, file) == "from-file"
    assert read_token(None, None) is None


def test_a_token_that_is_not_there_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_TOKEN", raising=False)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for env, file, message in (
        ("A_TOKEN", None, "A_TOKEN holds no token"),
        (None, empty, "holds no token"),
        (None, tmp_path / "missing", "cannot be read"),
        ("A_TOKEN", empty, "give one of them"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_token(env, file)


LIMITS: dict[str, Any] = dict.fromkeys(("threads", "max_waiting", "timeout_s", "max_request_bytes"), 1)
LIMITS |= {"device": "cpu", "dtype": "float32"}


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rewards.yaml"
    file.write_text(REWARDS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match=f"127.0.0.1:{port} cannot be listened on"):
            serve_rewards(file, Address("127.0.0.1", port, None), lambda url: None, **LIMITS)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "a.host.name"])
def test_other_machines_need_a_token(host: str, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="there is no token: give --token-env or --token-file"):
        serve_rewards(tmp_path / "rewards.yaml", Address(host, 0, None), lambda url: None, **LIMITS)
    assert all(is_loopback(own) for own in ("127.0.0.1", "::1", "localhost"))


def shown(folder: Path, *, is_json: bool = False, head: str = "") -> tuple[int, str]:
    text = io.StringIO()
    code = audit(None, folder, PlainConsole(file=text, width=200, soft_wrap=True), head=head, is_json=is_json)
    return code, text.getvalue()


@pytest.fixture(scope="module")
def audited_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("audited") / "run")


def test_a_run_without_a_fault_is_shown_with_its_figures(audited_run: Path) -> None:
    code, text = shown(audited_run)
    assert code == 0
    lines = {line[:12].strip(): line[12:].strip() for line in text.splitlines()}
    assert lines["part 2"].startswith("resumed from the checkpoint of version 2; done")
    assert lines["trained"] == "4 steps of 8 groups"
    assert lines["staleness"].endswith("mean 0.000, max 0 of 0 allowed")
    assert lines["rollout/0"] == "checksum+canary 6"
    assert lines["checkpoint"].endswith("of part 2: steps 3 to 4 after version 2")
    assert "nothing is missing, altered or out of order" in text


def test_every_figure_is_in_the_json(audited_run: Path) -> None:
    code, text = shown(audited_run, is_json=True)
    found = json.loads(text)
    assert (code, found["findings"], found["num_groups"], found["num_pushes"]) == (0, [], 8, 6)
    assert found["checkpoints"]["4"]["steps"] == [3, 4]


def test_a_finding_is_an_exit_code_of_1(audited_run: Path) -> None:
    code, text = shown(audited_run, head="0" * 64)
    assert code == 1
    assert "no record has the sha256 0000" in text


def test_a_folder_that_is_no_run_is_an_exit_code_of_2(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["audit", "--run", str(tmp_path / "none")]).exit_code == 2
    assert CliRunner().invoke(app, ["audit", "--run", str(tmp_path)]).exit_code == 2
