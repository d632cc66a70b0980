"""A run: its log, report, reproduction, exported policies, and the network between its nodes."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from group_data import OneRank
from learner_data import tiny_config
from metrics_data import go_on, write_run
from rich.console import Console
from runs import PROVENANCE
from safetensors.torch import load_file
from typer.testing import CliRunner

from mobula.cluster.audit.chain import ChainWriter
from mobula.cluster.audit.observer import RunAudit
from mobula.cluster.errors import PreflightError
from mobula.cluster.recovery.checkpoints import Checkpoints, CheckpointSchedule
from mobula.cluster.runtime.placement_groups import holders
from mobula.configs.errors import ConfigError
from mobula.configs.load import dump_config, load_config
from mobula.configs.schema import RunConfig
from mobula.configs.schema.run import Resume
from mobula.deploy.cli.commands import app
from mobula.deploy.host.run_folder import RECORD_FILE
from mobula.deploy.run import node_network
from mobula.deploy.run.logs import LOG_FILE, log_thread_failures, log_to, set_up_logging
from mobula.deploy.run.node_network import ListenAddress, ProbeEndpoint, refuse_unreached
from mobula.deploy.run.overview import code, machine, packages, reproduction
from mobula.deploy.run.run_report import earlier_wall_s
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

RED = "\x1b[31mboom\x1b[0m"


def logged(folder: Path, console: Console) -> None:
    set_up_logging(console)
    logger = logging.getLogger("mobula.deploy.anything")
    logger.info("before there is a folder")
    log_to(folder)
    logger.info("two\nlines")
    try:
        raise ValueError(RED)
    except ValueError:
        logger.warning("failed: %s", RED, exc_info=True)


def test_off_a_terminal_lines_have_times_and_none_is_broken_or_coloured(tmp_path: Path, restored_logging: None) -> None:
    screen = io.StringIO()
    logged(tmp_path, Console(file=screen, width=20))
    lines = screen.getvalue().splitlines()
    assert [line[20:] for line in lines] == [
        "before there is a folder", "two", "lines", "failed: boom (ValueError: boom)",
    ]  # fmt: skip
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)


def test_the_file_holds_no_colours_and_tracebacks(tmp_path: Path, restored_logging: None) -> None:
    logged(tmp_path, Console(file=io.StringIO()))
    text = (tmp_path / LOG_FILE).read_text(encoding="utf-8")
    assert "\x1b" not in text and "Traceback" in text and "ValueError: boom" in text
    assert "before there is a folder" in text.splitlines()[0]


def test_a_log_that_cannot_be_written_is_named_once_and_costs_its_lines_alone(
    tmp_path: Path, restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    set_up_logging(Console(file=screen))
    (tmp_path / LOG_FILE).symlink_to("/dev/full")
    log_to(tmp_path)
    for number in range(3):
        logging.getLogger("mobula.deploy.anything").info("event %d", number)
    lines = [line[20:] for line in screen.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("event")] == ["event 0", "event 1", "event 2"]
    assert len([line for line in lines if "run.log cannot be written" in line and "No space left" in line]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_failed_thread_is_one_line(tmp_path: Path, restored_logging: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    screen = io.StringIO()
    set_up_logging(Console(file=screen))
    log_thread_failures()
    thread = threading.Thread(target=lambda: 1 / 0, name="writer")
    thread.start()
    thread.join()
    shown = screen.getvalue()
    assert shown[20:] == "thread writer ended with an error (ZeroDivisionError: division by zero)\n"


KILLED = '<span class="status killed">the driver was killed</span>'

FACT = re.compile(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of six steps that is done."""
    write_run(tmp_path / "digits", num_steps=6)
    return tmp_path / "digits"


def report(folder: Path) -> Result:
    return CliRunner().invoke(app, ["report", str(folder)])


def page(folder: Path) -> str:
    found = report(folder)
    assert found.exit_code == 0, found.output
    assert str(folder / "report.html") in found.output
    return (folder / "report.html").read_text(encoding="utf-8")


def facts(html: str) -> dict[str, str]:
    """The numbers of the headline."""
    return dict(FACT.findall(html.partition('<dl class="facts">')[2].partition("</dl>")[0]))


def kill(folder: Path) -> None:
    """Leave the folder as a driver that is killed does."""
    (folder / "summary.json").unlink()
    go_on(folder, start_ticks_off=-1)


def test_the_report_of_a_run_that_is_done_is_written_again(run: Path) -> None:
    first = page(run)
    assert '<span class="status done">done</span>' in first
    (run / "report.html").unlink()
    assert page(run) == first


def test_a_run_is_found_by_its_name_below_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.parent.rename(run.parent.with_name("runs"))
    monkeypatch.chdir(run.parent.parent)
    assert CliRunner().invoke(app, ["report", "digits"]).output.strip() == "report: runs/digits/report.html"


def test_the_headline_of_a_killed_run_has_the_numbers_of_its_finished_steps(run: Path) -> None:
    whole = facts(page(run))
    kill(run)
    html = page(run)
    assert KILLED in html and "at least: that of the finished steps" in html
    assert len(whole) == 13
    assert {name: text for name, text in facts(html).items() if name != "wall time"} == {
        name: text for name, text in whole.items() if name != "wall time"
    }
    assert not (run / "summary.json").exists(), "no other command may take it for a run that ended"


def test_a_half_written_last_line_and_a_run_without_a_step_have_a_report(run: Path) -> None:
    kill(run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:4], lines[4][:40]]))
    assert facts(page(run))["steps"] == str(sum('"kind": "step"' in line for line in lines[:4]))
    (run / "metrics.jsonl").write_text("")
    html = page(run)
    assert KILLED in html and facts(html)["steps"] == "0" and "No step was finished" in html


def test_the_summary_of_an_earlier_part_is_not_that_of_a_part_that_was_killed(run: Path) -> None:
    earlier = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**earlier, "version": 4, "num_steps": 4, "wall_s": 3600.0}))
    go_on(run, start_ticks_off=-1)
    html = page(run)
    assert KILLED in html and facts(html)["steps"] == "6" and facts(html)["wall time"] == "1 h 00 min"
    (run / RECORD_FILE).unlink()  # as `mobula doctor --free` does
    assert KILLED in page(run), "there are more steps than the summary has"


@pytest.mark.parametrize(
    ("word", "said"), [("nowhere", "there is no run in nowhere"), (".", "give the run's FOLDER, or its NAME below")]
)
def test_a_folder_without_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["report", word])
    assert found.exit_code == 2 and said in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_still_running_is_refused(run: Path) -> None:
    go_on(run)
    found = report(run)
    assert found.exit_code == 2 and "run digits is still running, in process" in found.stderr
    assert not (run / "report.html").exists()


def test_a_driver_of_another_machine_cannot_be_looked_at_from_here(run: Path) -> None:
    go_on(run, host="another-machine")
    found = report(run)
    assert found.exit_code == 2 and "may still be running" in found.stderr and "of another-machine" in found.stderr
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (RECORD_FILE, "{", "is no record of a run"),
        ("metrics.jsonl", "{\n{}\n", "line 1 is not JSON"),
        ("config.yaml", "seed: 1\n", "is no configuration of a run"),
        ("config.yaml", "a: [", "is no configuration of a run"),
    ],
)
def test_a_broken_file_is_named(run: Path, file: str, text: str, said: str) -> None:
    kill(run)
    (run / file).write_text(text)
    found = report(run)
    assert found.exit_code == 2 and file in found.stderr and said in found.stderr


@pytest.mark.parametrize(("text", "seconds"), [('{"wall_s": 12.5}', 12.5), ("{", 0.0), ("{}", 0.0), (None, 0)])
def test_wall_time_of_earlier_parts_is_that_of_their_summary(tmp_path: Path, text: str | None, seconds: float) -> None:
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    assert earlier_wall_s(tmp_path) == seconds


def test_groups_are_counted_by_the_run_that_holds_them() -> None:
    names = ["mine/learner/0/1f", "mine/rollout/0/2e", "other/reward/0/aa", ""]
    assert holders(names) == {"mine": 2, "other": 1}


WORDS = ("experiment=digits", "resources=laptop", "seed=3", "algorithm.kl.coef=0.25", "resume=auto")


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    folder.mkdir()
    config = load_config([*WORDS, "name=first", f"folder={tmp_path}"])
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    return folder


def test_a_run_that_reproduces_another_has_its_keys_and_a_name_of_its_own(origin: Path) -> None:
    first = load_config([*WORDS, "name=first", f"folder={origin.parent}"])
    again = load_config([f"reproduce={origin}"])
    assert (again.name, again.resume, again.reproduce) == ("first-again", "never", str(origin))
    own = {"name": first.name, "resume": first.resume, "reproduce": ""}
    assert again.model_copy(update=own) == first


def test_further_words_win_and_groups_are_refused(origin: Path) -> None:
    again = load_config([f"reproduce={origin}", "seed=4", "name=other", "resume=auto"])
    assert (again.seed, again.name, again.resume, again.algorithm.kl.coef) == (4, "other", "auto", 0.25)
    with pytest.raises(ConfigError, match="chooses a group"):
        load_config([f"reproduce={origin}", "resources=gpu_1"])
    with pytest.raises(ConfigError, match=r"reproduce=nowhere: there is no config\.yaml"):
        load_config(["reproduce=nowhere"])


def test_words_packages_and_data_that_differ_are_named(origin: Path, caplog: pytest.LogCaptureFixture) -> None:
    was: dict[str, Any] = {**PROVENANCE, "packages": {"torch": "1", "ray": "2"}, "data": {"rows": "a"}}
    audit = RunAudit(ChainWriter(origin), origin)
    audit.started(was)
    config = load_config([f"reproduce={origin}", "seed=4"])
    now = was | {"packages": {"torch": "1", "ray": "3"}, "data": {"rows": "b"}}
    found = reproduction(config, now)["reproduces"]
    differences = {"seed": [3, 4], "packages.ray": ["2", "3"], "data.rows": ["a", "b"]}
    assert found == {"run": str(origin), "differences": differences}
    assert all(text in caplog.text for text in ("seed=4 (was 3)", "packages.ray=3 (was 2)", "data.rows=b (was a)"))
    assert reproduction(load_config([f"reproduce={origin}"]), was)["reproduces"]["differences"] == {}


def test_code_packages_and_machine_are_functions_of_this_environment() -> None:
    assert code() == code()
    assert len(code()["sha256"]) == 64
    assert {"torch", "ray", "transformers"} <= packages().keys()
    assert machine()["num_cores"] >= 1


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(node_network, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(node_network, "CONNECT_S", 2.0)


@pytest.fixture
def endpoint() -> Iterator[ProbeEndpoint]:
    found = ProbeEndpoint("10.0.0.1")
    yield found
    found.close()


def test_an_endpoint_is_reached_at_the_address_of_its_node(endpoint: ProbeEndpoint) -> None:
    place = endpoint.open()
    assert (place.host, place.interface) == ("127.0.0.1", "lo")
    assert ProbeEndpoint("10.0.0.2").unreached([place, place]) == []


def test_a_closed_port_and_another_process_are_seen(endpoint: ProbeEndpoint) -> None:
    place = endpoint.open()
    [(other, why)] = ProbeEndpoint("b").unreached([replace(place, node="10.0.0.9")])
    assert other.node == "10.0.0.9" and "10.0.0.1 answers at that address" in why
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    [(_, why)] = ProbeEndpoint("b").unreached([replace(place, port=port)])
    assert "refused" in why


def test_a_chosen_interface_is_where_it_listens(endpoint: ProbeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_network, "node_address", lambda: "127.0.0.2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    place = endpoint.open()
    assert (place.host, place.interface) == ("127.0.0.1", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    assert ProbeEndpoint("c").open().interface is None, "a name that no interface has"


def test_the_refusal_names_both_ends_and_the_remedy() -> None:
    a = ListenAddress("a (10.0.0.1)", "10.0.0.1", 4000, "eth0")
    b = ListenAddress("b (10.0.0.2)", "127.0.0.1", 4001, "lo")
    refuse_unreached({a: [], b: []})
    with pytest.raises(PreflightError) as refused:
        refuse_unreached({a: [(b, "Connection refused")], b: []})
    message = str(refused.value)
    ends = "a (10.0.0.1) at 10.0.0.1 on eth0 does not reach b (10.0.0.2) at 127.0.0.1 on lo"
    assert f"{ends}: Connection refused" in message
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in message and "--node-ip-address" in message


LORA = ("policy.lora.rank=4", "learner=fsdp2")  # the learner below is one process; what it saves has the same layout


def run_folder(folder: Path, config: RunConfig, steps: tuple[int, ...] = ()) -> Path:
    """A run with a checkpoint of each of `steps`, before which some weight grew by 1."""
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    single = config.model_copy(update={"learner": config.learner.model_copy(update={"backend": "single"})})
    learner = OneRank(single)

    async def nothing() -> None: ...

    unused = {"parts": {}, "prepare": nothing, "finish": nothing, "identity": {}}
    schedule = CheckpointSchedule(1, 9, 9)
    checkpoints = Checkpoints(
        run / "checkpoints", learner=learner, resume_mode=Resume.AUTO, schedule=schedule, **unused
    )
    trained = next(p for name, p in learner.rank.policy.named_parameters() if p.requires_grad and "lora_A" not in name)
    for step in steps:
        trained.data += 1.0
        learner.rank.version = step
        asyncio.run(checkpoints.save(step))
    return run


def exported(*words: object) -> str:
    """What the command prints; it must end with exit code 0."""
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: object) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)


def moved(folder: Path, model: Path) -> float:
    """How far the weights of an export are from the model's, at most."""
    ours, theirs = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_newest_or_chosen_step_is_written_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path, tiny_config(model), (0, 2))
    assert "step 2 of" in exported(run)
    assert moved(run / "export" / "step-000002", model) == pytest.approx(2)
    exported(run, "--step", 0, "--output", tmp_path / "own")
    assert moved(tmp_path / "own", model) == pytest.approx(1)
    assert "step-000002 exists: give another folder with --output" in refused(run)
    assert sorted(path.name for path in (run / "export").iterdir()) == ["step-000002"], "nothing half written"
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "named")
    monkeypatch.chdir(tmp_path)
    assert "step 2 of runs/named" in exported("named", "--output", "by-name")


def test_adapters_are_written_alone_or_merged(model: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path, tiny_config(model, *LORA), (1,))
    assert "a PEFT adapter of" in exported(run)
    factors = load_file(run / "export" / "step-000001-adapter" / "adapter_model.safetensors")
    assert any(torch.equal(tensor, torch.ones_like(tensor)) for name, tensor in factors.items() if "lora_B" in name)
    exported(run, "--merge")
    assert moved(run / "export" / "step-000001", model) > 1e-3


def test_what_cannot_be_exported_is_named_with_the_next_action(model: Path, tmp_path: Path) -> None:
    message, nothing = refused(tmp_path / "nothing"), tmp_path / "nothing"
    assert f"there is no run in {nothing} or" in message and "give the run's FOLDER, or its NAME" in message
    run = run_folder(tmp_path, tiny_config(model))
    assert "holds no complete checkpoint: wait for the first one" in refused(run)
    assert "no checkpoint of step 7; it has these steps: none" in refused(run, "--step", 7)
    assert "no adapters to merge (policy.lora.rank=0): leave out --merge" in refused(run, "--merge")


def test_a_damaged_checkpoint_and_a_step_that_is_not_there_are_named(model: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path, tiny_config(model), (0, 1))
    assert "no checkpoint of step 7; it has these steps: 0, 1" in refused(run, "--step", 7)
    [file] = (run / "checkpoints" / "step-000001" / "learner").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert "step-000001 is not complete" in refused(run, "--step", 1)
    assert "step 0 of" in exported(run), "the newest complete one"


def test_a_model_that_is_gone_is_named_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path, tiny_config(model), (0,))
    config = tiny_config(model).model_copy(update={"policy": tiny_config(tmp_path / "gone").policy})
    (run / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    message = refused(run)
    assert f"policy.model={tmp_path / 'gone'}" in message and "can be read from here" in message
    assert list((run / "export").iterdir()) == []
