"""Engine and learner compute the same for every family, before and after pushes; four of them in every run."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest

from benchmarks.conformance.__main__ import measure_apart
from benchmarks.conformance.measure import ALL, TIED, takes_media
from benchmarks.conformance.table import failures
from mobula.configs.schema.rollout import SamplerKind
from mobula.deploy.checks.parity import CASES, SOUNDS, VIDEOS
from mobula.learner.policies.families import family_at
from mobula.learner.policies.families.base import AudioFamily, VideoFamily
from mobula.learner.policies.tiny import TINY

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.timeout(3000)]

USUAL = ("qwen2.5-vl", "qwen3-vl", "internvl3", f"idefics3{TIED}")
HERE = [name for name in TINY if name != "smolvlm" or importlib.util.find_spec("num2words")]
OTHERS = tuple(name for name in (*HERE, *(f"{name}{TIED}" for name in HERE)) if name not in USUAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")


# Not a fixture: one with a parameter is made again for every test.
measured = cache(measure_apart)

FAMILIES = [pytest.param(USUAL, name, id=name) for name in USUAL]
FAMILIES += [pytest.param(OTHERS, name, marks=pytest.mark.exhaustive, id=name) for name in OTHERS]


@pytest.mark.parametrize(("names", "name"), FAMILIES)
def test_a_family_conforms(folder: Path, names: tuple[str, ...], name: str) -> None:
    report = measured(names, folder)[name]
    assert failures(report) == []
    family = family_at(str(folder / name / "model"))
    assert set(report.moved) == ({*family.parts, ALL} if takes_media(family) else {ALL})
    sees = not family.without_images_on("cpu", SamplerKind.VLLM)
    expected = {*CASES} if sees else {"text"}
    expected |= {*VIDEOS} if isinstance(family, VideoFamily) else set()
    if isinstance(family, AudioFamily):
        expected |= {name for name, (_, images, _) in SOUNDS.items() if sees or not images}
    assert set(report.gaps) == expected
    assert report.adapters is not None
    assert report.num_parameters < 3_000_000
