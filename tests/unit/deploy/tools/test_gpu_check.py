"""The runner of the GPU check: outcomes, deadlines, crashes, and going on with what is not finished."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from docs.generate.checked_machines import BEGIN, END, TARGET, status_rows, text

from mobula.configs.load import load_config
from mobula.deploy.checks.gpu_check import check as runner
from mobula.deploy.checks.gpu_check import training
from mobula.deploy.checks.gpu_check.check import (
    RESULTS_FILE,
    STAGES,
    CheckedMachine,
    CheckOptions,
    CheckResults,
    CheckStage,
    Outcome,
    StageResult,
    check,
    read_results,
    table,
)
from mobula.deploy.checks.gpu_check.roles import Context, overrides

MACHINE = CheckedMachine("cpu", "x86_64 with 2 cores", 0, "3.12.0", {"torch": "2.11.0"})
PROGRAMS = {  # what the process of a stage does
    "good": "open(result, 'w').write(json.dumps({'outcome': 'passed', 'figures': {'step_s': 0.5}}))",
    "bad": "open(result, 'w').write(json.dumps({'outcome': 'failed', 'cause': 'AssertionError: 1 is not 2'}))",
    "crash": "print('out of luck', flush=True); os.abort()",
    "hang": "time.sleep(60)",
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose stages are `PROGRAMS`; the folder has a file with each stage that was started."""
    program = tmp_path / "program"
    program.write_text(
        "import json, os, sys, time\n"
        "name, result = sys.argv[3], sys.argv[-1]\n"
        f"open({str(tmp_path / 'started')!r}, 'a').write(name + ' ')\n"
        f"exec({PROGRAMS!r}[name])\n"
    )
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(wrapper))
    monkeypatch.setattr(runner.CheckedMachine, "here", classmethod(lambda cls, device: replace(MACHINE, device=device)))
    stages = (
        CheckStage("good", "A", 30),
        CheckStage("bad", "B", 30),
        CheckStage("crash", "C", 30),
        CheckStage("hang", "D", 1.5),
        CheckStage("gpus", "E", 30, num_gpus=2),
        CheckStage("package", "F", 30, ("no_such_package",)),
        CheckStage("none", "G", 30, missing="no transport"),
    )
    monkeypatch.setattr(runner, "STAGES", stages)
    return tmp_path


def started(folder: Path) -> list[str]:
    file = folder / "started"
    return file.read_text().split() if file.exists() else []


def test_every_outcome_is_a_row_with_its_cause(machine: Path) -> None:
    lines: list[str] = []
    results = check(CheckOptions("cpu", machine / "out"), lines.append)
    outcomes = {name: found.outcome.value for name, found in results.stages.items()}
    expected = ["passed", "failed", "failed", "failed", "not here", "not here", "not here"]
    assert outcomes == dict(zip(("good", "bad", "crash", "hang", "gpus", "package", "none"), expected, strict=True))
    causes = {name: found.cause for name, found in results.stages.items()}
    assert causes["bad"] == "AssertionError: 1 is not 2"
    assert causes["crash"].startswith("its process was killed by SIGABRT: ")
    assert "out of luck" in (machine / "out" / "crash.log").read_text()
    assert causes["hang"].startswith("not done within 1.5 s")
    assert causes["gpus"] == "2 GPUs that torch can use; there are 0"
    assert causes["package"] == "no_such_package is not installed"
    assert (len(lines), results.stages["good"].figures) == (7, {"step_s": 0.5})
    assert read_results(machine / "out" / RESULTS_FILE) == results


def test_a_second_call_runs_what_is_not_finished_and_a_named_stage_again(machine: Path) -> None:
    options = CheckOptions("cpu", machine / "out")
    check(replace(options, only=("good",)), lambda line: None)
    check(options, lambda line: None)
    assert started(machine) == ["good", "bad", "crash", "hang"]
    check(options, lambda line: None)
    assert started(machine)[4:] == []
    check(replace(options, only=("bad",)), lambda line: None)
    assert started(machine)[4:] == ["bad"]


def test_a_stage_that_the_budget_cuts_is_not_finished(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST_S", 0.1)
    monkeypatch.setattr(runner, "STAGES", (CheckStage("hang", "D", 30), CheckStage("good", "A", 30)))
    lines: list[str] = []
    results = check(CheckOptions("cpu", machine / "out", budget_s=1.0), lines.append)
    assert (results.stages, len(lines)) == ({}, 1)
    assert "out of time" in lines[0]


def test_results_of_another_machine_are_refused(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = CheckOptions("cpu", machine / "out", ("good",))
    check(options, lambda line: None)
    with pytest.raises(ValueError, match="another device: give another --folder"):
        check(replace(options, device="cuda"), lambda line: None)


def test_without_a_gpu_only_the_first_stage_runs_and_says_why(machine: Path) -> None:
    results = check(CheckOptions("cuda", machine / "out"), lambda line: None)
    assert started(machine) == ["good"]
    assert {found.outcome for name, found in results.stages.items() if name != "good"} == {Outcome.NOT_HERE}
    assert "no GPU that torch can use" in results.stages["bad"].cause


@pytest.mark.parametrize(
    "own",
    [
        ("sampler=huggingface",),
        ("sampler=vllm",),
        (*training.PACKING_WORDS, "resources.dtype=float32", "learner.packing=true"),
        (*training.SHARDING_WORDS, "learner=fsdp2", "resources.learner.num_workers=1"),
        (*training.SHARDING_WORDS, "learner=fsdp2", "resources.learner.num_workers=8"),
        ("sampler=vllm", *training.SPLIT),
        training.PRETRAINED_WORDS,
        training.FLOW_SAMPLER_WORDS,
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_configurations_of_stages_are_valid_on_each_device(own: tuple[str, ...], device: str, tmp_path: Path) -> None:
    context = Context(device, tmp_path)
    words = own if "experiment=glyphs_grpo" in own else overrides(*own)
    if device == "cpu" and own == ("sampler=vllm", *training.SPLIT):
        pytest.skip("vLLM on CPU has no tensor parallelism")
    config = load_config(context.words(*words, "policy.model=unused"))
    assert config.resources.device == device


def test_the_peak_of_allocations_counts_what_was_freed_and_not_what_was_before(tmp_path: Path) -> None:
    before = torch.zeros(1 << 20)

    def work() -> None:
        first = before + 1  # 4 MiB
        del first
        second, third = before + 2, before[: 1 << 19] + 3  # 4 and 2 MiB
        assert second is not third

    allocated = training.allocated_bytes(Context("cpu", tmp_path), work)
    assert allocated == pytest.approx(6 << 20, abs=1024)  # a number that is added is a tensor as well


def test_an_unknown_stage_and_a_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="speed is no stage of the GPU check: choose torch_cuda"):
        check(CheckOptions("cpu", tmp_path, ("speed",)), lambda line: None)
    (tmp_path / RESULTS_FILE).write_text(json.dumps({"machine": {}}))
    with pytest.raises(ValueError, match="holds no results of a GPU check"):
        read_results(tmp_path / RESULTS_FILE)


def test_the_tables_name_machine_figures_and_causes() -> None:
    at = "2026-11-26T10:00:00+00:00"
    passed = StageResult(Outcome.PASSED, figures={"step_s": 0.1234}, seconds=2.0, finished_at=at)
    failed = StageResult(Outcome.FAILED, "AssertionError: no", finished_at="2026-11-27T10:00:00+00:00", commit="abc")
    card = replace(MACHINE, device="cuda", name="NVIDIA H100", num_gpus=2)
    one, two = CheckResults(MACHINE, {"learner": passed}), CheckResults(card, {"learner": failed})
    assert "step_s 0.123" in table(one) and "torch 2.11.0" in table(one)
    assert "2 x NVIDIA H100" in table(two) and "AssertionError: no" in table(two)
    row = next(line for line in status_rows([one, two]).splitlines() if "transformers sampler" in line)
    assert row.split(" | ")[1:] == [
        "x86_64 with 2 cores, torch 2.11.0 (2026-11-26)",
        "NVIDIA H100 x 2, torch 2.11.0 (2026-11-27, abc) |",
    ]


def test_the_readme_has_the_status_of_the_kept_results() -> None:
    page = TARGET.read_text(encoding="utf-8")
    assert page[page.index(BEGIN) : page.index(END) + len(END)] == text(), (
        "run python -m docs.generate.checked_machines"
    )


def test_every_stage_has_a_function() -> None:
    modules = {name: import_module(f"{runner.__package__}.{name}") for name in {stage.module for stage in STAGES}}
    assert all(hasattr(modules[stage.module], f"check_{stage.name}") for stage in STAGES if not stage.missing)
