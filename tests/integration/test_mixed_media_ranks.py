"""A step of text, one image, three images and a video on two ranks of FSDP2 and of ZeRO-3 equals one process's."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import equal
from mixed_media_ranks import BACKENDS, update

from mobula.learner.policies.tiny import write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.exhaustive, pytest.mark.timeout(900)]

NAMES = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "internvl3", "glm4v")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below the name of each backend, what its ranks made of each model. Ranks that wait for each other run into the
    test's timeout."""
    out = tmp_path_factory.mktemp("ranks")
    for name in NAMES:
        write_tiny(name, out / name, seed=1)
    multiprocessing.set_forkserver_preload(["mixed_media_ranks"])
    for backend, (num_ranks, _) in BACKENDS.items():
        folder = out / backend
        folder.mkdir()
        for name in NAMES:  # DeepSpeed keeps process groups of a model that is gone: processes of its own for each
            mp.start_processes(update, args=(backend, name, out, folder), nprocs=num_ranks, start_method="forkserver")
    return out


@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one(ran: Path, backend: str, name: str) -> None:
    one, two = (torch.load(ran / folder / f"{name}.pt") for folder in ("one", backend))
    assert equal(one["after"], two["after"], atol=2e-6)
    assert not equal(one["after"], one["before"], atol=2e-5)
    assert two["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-4)
