"""`mobula lmms-eval` around a harness that is a small script: what it is given, what is read back, how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from waiting import wait_until

from mobula.cluster.errors import DeadlineError, PreflightError
from mobula.configs.errors import ConfigError
from mobula.deploy.checks.lmms_eval import (
    HarnessError,
    LmmsEval,
    child_environment,
    command_line,
    evaluate,
    numbers,
    primary_metric,
    read_results,
)
from mobula.deploy.cli import app
from mobula.deploy.host.processes import ProcessId

# Stands where the harness's interpreter does: prints versions, and then does what the test wrote into `play.py`.
FAKE = """#!{python}
import json, pathlib, runpy, sys
if sys.argv[1] == "-c":
    print(json.dumps({{name: "1.2.3" for name in sys.argv[3:]}}))
else:
    sys.path.insert(0, {folder!r})
    runpy.run_path({play!r}, run_name="__main__")
"""
LEAVE = """
import json, os, pathlib, sys
raw = pathlib.Path("raw/m")
raw.mkdir(parents=True)
results, samples = json.loads(os.environ["LEFT"])
(raw / "1_results.json").write_text(json.dumps(results))
for task, lines in samples.items():
    (raw / f"1_samples_{task}.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""

HANG = """
import os, pathlib, subprocess, time
child = subprocess.Popen(["sleep", "600"])
print("still loading", flush=True)
draft = pathlib.Path({pids!r} + ".draft")
draft.write_text(f"{{os.getpid()}} {{child.pid}}")
draft.rename({pids!r})
time.sleep(600)
"""


def all_gone(pids: Path) -> bool:
    """Whether these processes end; a zombie that is not reaped has ended."""
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: ProcessId.of(pid) is None, what=lambda pid=pid: f"process {pid} is there")
    return True


def sample(answer: object, tokens: int = 3) -> dict[str, Any]:
    return {"doc_id": 0, "target": "7", "filtered_resps": answer, "token_counts": [{"output_tokens": tokens}]}


def results(rows: dict[str, Any], groups: dict[str, list[str]] | None = None) -> dict[str, Any]:
    members = {name: (groups or {}).get(name, []) for name in rows}
    return {"results": rows, "group_subtasks": members, "total_evaluation_time_seconds": "2.5"}


@pytest.fixture
def play(tmp_path: Path) -> Path:
    """What the fake harness does; its environment is `tmp_path / "environment"`."""
    play = tmp_path / "play.py"
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE.format(python=sys.executable, folder=str(tmp_path), play=str(play)))
    python.chmod(0o755)
    return play


@pytest.fixture
def asked(tmp_path: Path) -> LmmsEval:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    return LmmsEval(
        model=str(model), tasks="mini,other", batch_size=2, device="cpu", output=tmp_path / "runs",
        cache=tmp_path / "cache", environment=tmp_path / "environment", timeout_s=60.0,
    )  # fmt: skip


def leave(play: Path, monkeypatch: pytest.MonkeyPatch, rows: dict[str, Any], samples: dict[str, Any]) -> None:
    play.write_text(LEAVE)
    monkeypatch.setenv("LEFT", json.dumps([results(rows), samples]))


@pytest.mark.parametrize(
    ("metrics", "primary"),
    [
        (("exact_match", "anls", "acc", "relaxed_overall"), "anls"),
        (("exact_match", "acc", "relaxed_overall"), "relaxed_overall"),
        (("exact_match", "acc"), "acc"),
        (("a_first", "exact_match"), "exact_match"),
        (("zeta", "bleu"), "bleu"),
        (("acc,strict", "bleu"), "acc,strict"),
        (("acc,loose", "acc"), "acc"),
        (("acc,strict", "acc,loose"), "acc,loose"),
        (("b", "a,strict"), "b"),
        (("accuracy", "b"), "accuracy"),
        ((), None),
    ],
)
def test_the_primary_metric_is_the_first_known_one(metrics: tuple[str, ...], primary: str | None) -> None:
    assert primary_metric(dict.fromkeys(metrics, 0.5)) == primary


def test_only_finite_numbers_of_a_row_are_metrics() -> None:
    row = {
        "alias": "mini", "acc,none": 0.5, "acc,strict": 1, "acc_stderr,none": "N/A", "submission,none": None,
        "nan,none": float("nan"), "flag,none": True,
    }  # fmt: skip
    assert numbers(row) == {"acc": 0.5, "acc,strict": 1.0}


def test_groups_count_once_through_their_tasks_and_the_newest_results_are_read(tmp_path: Path) -> None:
    rows = {
        "all": {"acc,none": 0.9},
        "mini": {"anls,none": 0.25, "acc,none": 1.0, "anls_stderr,none": 0.1},
        "other": {"acc,none": 0.75},
        "hidden": {"submission,none": None},
    }
    (tmp_path / "m").mkdir()
    for stamp, whole in (("2", results({"mini": {"acc,none": 0.0}})), ("1", results(rows, {"all": ["mini"]}))):
        (tmp_path / "m" / f"{stamp}_results.json").write_text(json.dumps(whole))
        for task in rows:
            lines = [sample("7"), sample(" "), sample(["a", "b"])] if task == "mini" else [sample("x", tokens=1)]
            (tmp_path / "m" / f"{stamp}_samples_{task}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    os.utime(tmp_path / "m" / "2_results.json", (1, 1))
    read = read_results(tmp_path)
    assert [(task["task"], task["primary_metric"], task["primary_score"]) for task in read["tasks"]] == [
        ("mini", "anls", 0.25),
        ("other", "acc", 0.75),
        ("hidden", None, None),
    ]
    assert read["groups"] == {"all": {"acc": 0.9}}
    assert read["mean_primary_score"] == 0.5
    mini = read["tasks"][0]
    assert (mini["stderr"], mini["num_samples"], mini["num_empty_answers"]) == ({"anls_stderr": 0.1}, 3, 1)
    assert (mini["mean_output_tokens"], read["num_samples"], read["harness_seconds"]) == (3.0, 5, 2.5)


def test_the_command_holds_what_was_asked(asked: LmmsEval, tmp_path: Path) -> None:
    asked = replace(asked, include_path=tmp_path, limit=4.0, model_args=("max_pixels=3136", "device_map=auto"))
    asked = replace(asked, harness_options=("--force_simple", "--gen_kwargs", "temperature=0"))
    assert command_line(asked) == [
        str(tmp_path / "environment" / "bin" / "python"), "-m", "lmms_eval", "eval", "--model", "qwen2_5_vl",
        "--model_args", f"pretrained={tmp_path}/model,device_map=cpu,max_pixels=3136,device_map=auto",
        "--tasks", "mini,other", "--device", "cpu", "--batch_size", "2", "--output_path", "raw", "--log_samples",
        "--verbosity", "WARNING", "--include_path", str(tmp_path), "--limit", "4",
        "--force_simple", "--gen_kwargs", "temperature=0",
    ]  # fmt: skip


def test_all_gpus_and_models_of_other_kinds_are_left_to_the_harness(asked: LmmsEval) -> None:
    on_all_gpus = command_line(replace(asked, device="cuda"))
    hub = command_line(replace(asked, model="llava-hf/some", model_type="llava_hf", device="cuda:1"))
    assert on_all_gpus[on_all_gpus.index("--model_args") + 1] == f"pretrained={asked.model}"
    assert hub[hub.index("--model_args") + 1] == "pretrained=llava-hf/some"
    assert hub[hub.index("--device") + 1] == "cuda:1"


def test_an_endpoint_is_asked_by_its_url_and_its_key_stands_on_no_command_line(asked: LmmsEval) -> None:
    asked = replace(asked, model="served", endpoint="http://127.0.0.1:8000/v1", key_env="MY_KEY", batch_size=8)
    words = command_line(asked)
    variables = child_environment(asked, {"MY_KEY": "secret", "OPENAI_API_KEY": "another"})
    assert words[words.index("--model") + 1] == "openai"
    assert words[words.index("--model_args") + 1] == "model=served,base_url=http://127.0.0.1:8000/v1,num_concurrent=8"
    assert "--device" not in words
    assert "secret" not in " ".join(words)
    assert variables["OPENAI_API_KEY"] == "secret"
    assert "HF_HUB_OFFLINE" not in variables
    without = child_environment(replace(asked, key_env=None), {"OPENAI_API_KEY": "another"})
    assert without["OPENAI_API_KEY"] == "none"  # a key goes only where it was meant to go


def test_a_local_folder_is_evaluated_offline_unless_asked_otherwise(asked: LmmsEval, tmp_path: Path) -> None:
    offline = child_environment(asked, {"HF_TOKEN": "hf_x", "HF_HOME": "/elsewhere"})
    assert offline["HF_HUB_OFFLINE"] == offline["HF_DATASETS_OFFLINE"] == "1"
    assert offline["HF_HOME"] == str(tmp_path / "cache")
    assert "HF_TOKEN" not in offline  # the harness would write it into its results
    assert offline["HUGGING_FACE_HUB_TOKEN"] == "hf_x"
    assert "HF_HUB_OFFLINE" not in child_environment(replace(asked, is_online=True), {})
    assert "HF_HUB_OFFLINE" not in child_environment(replace(asked, model="some/name"), {})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "some/name"}, "give the harness's name for it with --model-type"),
        ({"model_args": ("max_pixels",)}, "give --model-args NAME=VALUE"),
        ({"endpoint": "http://h/v1,x"}, "without commas"),
        ({"include_path": Path("/nowhere")}, "/nowhere is no folder"),
        ({"endpoint": "http://h/v1", "key_env": "MOBULA_NO_SUCH_KEY"}, "MOBULA_NO_SUCH_KEY: that variable is not set"),
    ],
)
def test_unfit_options_are_refused(asked: LmmsEval, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(replace(asked, **changed), lambda line: None)
    assert not asked.output.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [('{"model_type": "bert"}', "is a bert, which is none of qwen2_vl"), ("{}", "no config.json")],
)
def test_a_model_of_an_unknown_kind_is_refused(asked: LmmsEval, config: str, message: str) -> None:
    (Path(asked.model) / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        command_line(asked)


def test_without_its_environment_nothing_runs(asked: LmmsEval) -> None:
    with pytest.raises(PreflightError, match="make harness"):
        evaluate(asked, lambda line: None)


def test_the_artifact_has_scores_samples_versions(play: Path, asked: LmmsEval, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"mini": {"alias": "mini", "anls,none": 0.5}, "other": {"exact_match,none": 1.0}}
    leave(play, monkeypatch, rows, {"mini": [sample("a"), sample("")], "other": [sample("b")]})
    path, artifact = evaluate(asked, lambda line: None)
    assert json.loads(path.read_text()) == artifact
    assert artifact["versions"] == dict.fromkeys(("lmms-eval", "torch", "transformers", "datasets"), "1.2.3")
    assert (artifact["mean_primary_score"], artifact["num_samples"], artifact["harness_seconds"]) == (0.75, 3, 2.5)
    rounding_s = 0.001  # of the seconds that are written
    assert 3 / (artifact["seconds"] + rounding_s) < artifact["samples_per_s"] < 3 / (artifact["seconds"] - rounding_s)
    mini = artifact["tasks"][0]
    assert (mini["task"], mini["primary_metric"], mini["num_samples"], mini["num_empty_answers"]) == (
        "mini", "anls", 2, 1,
    )  # fmt: skip
    assert (path.parent / mini["samples_file"]).read_text().count("\n") == 2
    assert (path.parent / artifact["results_file"]).exists()
    assert (path.parent / artifact["log_file"]).exists()


def test_a_second_run_leaves_the_first_alone(play: Path, asked: LmmsEval, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(play, monkeypatch, {"mini": {"acc,none": 0.5}}, {"mini": [sample("a")]})
    paths = {evaluate(asked, lambda line: None)[0] for _ in range(2)}
    assert len(paths) == 2 and all(path.exists() for path in paths)


def test_a_failure_is_raised_with_the_last_lines_of_the_log(play: Path, asked: LmmsEval) -> None:
    play.write_text(
        "import sys\nprint('\\n'.join(f'line {n}' for n in range(60)))\n"
        "sys.exit('0%|  |\\r100%|##|\\n\\x1b[31mValueError\\x1b[0m: no such task')"
    )
    with pytest.raises(HarnessError, match=r"ended with 1; .*\nline 22\n") as caught:
        evaluate(asked, lambda line: None)
    lines = str(caught.value).splitlines()
    assert lines[-2:] == ["100%|##|", "ValueError: no such task"]
    assert "line 21" not in lines


def test_an_end_without_results_is_a_failure_too(play: Path, asked: LmmsEval) -> None:
    play.write_text("print('Error during evaluation: no dataset')")  # as the harness does: it exits with 0
    with pytest.raises(HarnessError, match="before it scored anything(.|\n)*Error during evaluation: no dataset"):
        evaluate(asked, lambda line: None)


def test_a_score_without_its_samples_is_a_failure(play: Path, asked: LmmsEval, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(play, monkeypatch, {"mini": {"acc,none": 0.5}}, {})
    with pytest.raises(HarnessError, match="task mini has a score, and no samples"):
        evaluate(asked, lambda line: None)


def test_answers_the_harness_made_up_fail_the_run_after_the_artifact_is_written(
    play: Path, asked: LmmsEval, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = sample("[LMMS_EVAL_REQUEST_FAILED after 5 retries] connection refused")
    leave(play, monkeypatch, {"mini": {"acc,none": 0.5}}, {"mini": [sample("a"), lost]})
    with pytest.raises(HarnessError, match="1 of 2 answers are the harness's own words"):
        evaluate(asked, lambda line: None)
    (artifact,) = asked.output.glob("*/lmms-eval.json")
    assert json.loads(artifact.read_text())["tasks"][0]["num_failed_requests"] == 1


def test_past_the_deadline_the_harness_ends_with_all_it_started(play: Path, asked: LmmsEval, tmp_path: Path) -> None:
    play.write_text(HANG.format(pids=str(tmp_path / "pids")))
    with pytest.raises(DeadlineError, match="--timeout 3 s and was killed(.|\n)*still loading"):
        evaluate(replace(asked, timeout_s=3.0), lambda line: None)
    assert all_gone(tmp_path / "pids")


def test_sigterm_ends_the_harness_with_all_it_started(play: Path, asked: LmmsEval, tmp_path: Path) -> None:
    play.write_text(HANG.format(pids=str(tmp_path / "pids")))
    words = ["lmms-eval", "--model", asked.model, "--tasks", "mini", "--environment", str(asked.environment)]
    command = [sys.executable, "-m", "mobula.deploy.cli", *words, "--output", str(asked.output), "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "pids").exists, what=lambda: "the harness did not start")
        process.terminate()
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "run it again" in printed
    assert all_gone(tmp_path / "pids")


def test_the_command_prints_a_table(play: Path, asked: LmmsEval, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(play, monkeypatch, {"mini": {"anls,none": 0.5, "anls_stderr,none": 0.125}}, {"mini": [sample("a")]})
    words = [
        "lmms-eval", "--model", asked.model, "--tasks", "mini", "--environment", str(asked.environment),
        "--output", str(asked.output), "--cache", str(asked.cache), "--device", "cpu", "--", "--force_simple",
    ]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    row = next(line for line in done.output.splitlines() if "anls" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["mini", "anls", "0.5000", "0.1250", "1", "0", "3.0"]
    assert "mean score 0.5000, 1 samples" in done.output
    (artifact,) = asked.output.glob("*/lmms-eval.json")
    assert json.loads(artifact.read_text())["command"].endswith("--force_simple")


def test_the_command_ends_with_1_when_the_harness_fails(play: Path, asked: LmmsEval) -> None:
    play.write_text("import sys\nsys.exit('out of memory')")
    words = ["lmms-eval", "--model", asked.model, "--tasks", "mini", "--environment", str(asked.environment)]
    done = CliRunner().invoke(app, [*words, "--output", str(asked.output), "--device", "cpu"])
    assert done.exit_code == 1
    assert "out of memory" in done.output
