"""The doctor of a cluster finds what differs between nodes, and names what to do about it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mobula.cluster.runtime.placement import NodeResources
from mobula.configs.load import load_config
from mobula.deploy.doctor.cluster import (
    Clock,
    Examined,
    NodeReport,
    check_cluster_placement,
    check_node,
    check_paths,
    report,
)
from mobula.deploy.doctor.this_machine import GIB, Verdict
from mobula.deploy.host.machine import CudaSoftware

CONFIG = load_config(["experiment=digits"])
VERSIONS = {"ray": "2.60.0", "torch": "2.13.0", "vllm": "0.32.0"}
FIT = NodeReport(
    "one", "10.0.0.1", "3.11.7", VERSIONS, (), "", ("H100",) * 8, None, "eth0",
    {"/shared": 900 * GIB, "/tmp": 90 * GIB}, GIB,
)  # fmt: skip
FIRST = Examined("one (10.0.0.1)", 8, FIT, Clock(0.0, 0.001))


def found(**changes: object) -> dict[str, tuple[Verdict, str, str]]:
    """Title -> what is found about a second node that differs from the first one in `changes`."""
    kept = {key: changes.pop(key) for key in ("clock", "num_gpus") if key in changes}
    node = replace(FIRST, name="two (10.0.0.2)", report=replace(FIT, **changes), **kept)
    findings = check_node(CONFIG, node, FIRST)
    return {f.name.removeprefix("two (10.0.0.2): "): (f.verdict, f.detail, f.action) for f in findings}


def test_a_node_that_is_like_the_first_is_fit() -> None:
    every = found()
    assert list(every) == ["versions", "paths", "GPUs", "network", "clock", "disk"]
    assert all(verdict is Verdict.OK and not action for verdict, _, action in every.values())


@pytest.mark.parametrize(
    ("changes", "title", "verdict", "message"),
    [
        ({"versions": {**VERSIONS, "torch": "2.12.0"}}, "versions", Verdict.MISSING, "torch 2.12.0 (2.13.0)"),
        ({"versions": {"ray": "2.60.0", "torch": "2.13.0"}}, "versions", Verdict.MISSING, "vllm missing (0.32.0)"),
        ({"python": "3.12.1"}, "versions", Verdict.MISSING, "python 3.12.1 (3.11.7)"),
        ({"unseen": ("data.path",)}, "paths", Verdict.MISSING, "does not see data.path"),
        ({"unwritable": "/shared cannot be written"}, "paths", Verdict.MISSING, "/shared cannot be written"),
        ({"gpus": ("H100",) * 7}, "GPUs", Verdict.MISSING, "Ray counts 8"),
        ({"gpus": ("H100",) * 7 + ("A100",)}, "GPUs", Verdict.WARNING, "A100"),
        ({"interface": None}, "network", Verdict.WARNING, "no interface has the Ray address 10.0.0.1"),
        ({"clock": Clock(-3.5, 0.2)}, "clock", Verdict.WARNING, "-3.500 s"),
        ({"clock": None}, "clock", Verdict.WARNING, "not read"),
        ({"free_disk": {"/shared": 2 * GIB}}, "disk", Verdict.WARNING, "/shared 2.0 GiB free"),
        ({"free_shared_memory": 1024}, "disk", Verdict.WARNING, "/dev/shm 0.0 GiB"),
    ],
)
def test_differences_name_an_action(changes: dict[str, object], title: str, verdict: Verdict, message: str) -> None:
    every = found(**changes)
    assert every[title][0] is verdict and message in every[title][1] and every[title][2]
    assert all(verdict is Verdict.OK for name, (verdict, _, _) in every.items() if name != title)


def test_the_cuda_software_of_a_node_is_examined() -> None:
    good = CudaSoftware(("H100",) * 8, 80 * GIB, "580.65", "2.13.0", "13.0", 8, "/usr/bin/gcc", "/usr/include", GIB)
    node = replace(FIRST, report=replace(FIT, cuda=replace(good, compiler="")))
    config = load_config(["experiment=digits", "resources=two_gpu"])
    gpus = next(f for f in check_node(config, node, FIRST) if f.name.endswith("GPUs"))
    assert gpus.verdict is Verdict.MISSING and "C compiler" in gpus.detail and "apt-get install gcc" in gpus.action
    fit = replace(FIRST, report=replace(FIT, cuda=good))
    assert next(f for f in check_node(config, fit, FIRST) if f.name.endswith("GPUs")).verdict is Verdict.OK


def test_a_clock_that_may_be_right_is_not_blamed() -> None:
    assert found(clock=Clock(3.0, 2.5))["clock"][0] is Verdict.OK


def test_a_node_without_the_package_is_reported_with_the_reason() -> None:
    node = Examined("three (10.0.0.3)", 0, None, None, "ModuleNotFoundError: No module named 'deploy'")
    [finding] = check_node(CONFIG, node, FIRST)
    assert finding.verdict is Verdict.MISSING and "No module named 'deploy'" in finding.detail


def test_relative_paths_and_a_preset_without_room_are_found() -> None:
    assert list(check_paths(CONFIG, [FIRST])) == []
    [finding] = check_paths(CONFIG, [FIRST, FIRST])
    assert finding.verdict is Verdict.MISSING and "folder=/SHARED/runs" in finding.action
    room = NodeResources("one", num_cpus=8, num_gpus=0)
    assert check_cluster_placement(CONFIG, [room]).verdict is Verdict.OK
    none = check_cluster_placement(load_config(["experiment=digits", "resources=multi_node"]), [room])
    assert none.verdict is Verdict.MISSING and none.action


def test_the_report_of_this_machine(tmp_path: Path) -> None:
    seen = report({"data.path": str(tmp_path), "policy.model": str(tmp_path / "none")}, str(tmp_path / "runs" / "new"))
    assert seen.unseen == ("policy.model",) and seen.unwritable == ""
    assert seen.python == ".".join(map(str, sys.version_info[:3])) and "torch" in seen.versions
    assert seen.free_disk[str(tmp_path)] > 0 and not (tmp_path / "runs").exists()
    assert seen.interface == "lo" and seen.address == "127.0.0.1", "outside of a cluster"
