"""A mixed step of two FSDP2 ranks ends and equals one process's, for every family: no rank misses a vision call."""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import equal
from family_ranks import update_all

from mobula.learner.policies.tiny import TINY, write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.exhaustive, pytest.mark.timeout(1800)]

NAMES = [name for name in TINY if name != "smolvlm" or importlib.util.find_spec("num2words")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below `1` and `2`, what one process and two ranks made of each model."""
    out = tmp_path_factory.mktemp("ranks")
    for name in NAMES:
        write_tiny(name, out / name, seed=1)
    multiprocessing.set_forkserver_preload(["family_ranks"])
    for number in (1, 2):
        folder = out / str(number)
        folder.mkdir()
        arguments = (number, NAMES, out, folder)
        mp.start_processes(update_all, args=arguments, nprocs=number, start_method="forkserver")
    return out


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one(ran: Path, name: str) -> None:
    one, two = (torch.load(ran / number / f"{name}.pt") for number in ("1", "2"))
    assert equal(one["after"], two["after"], atol=2e-6)
    assert not equal(one["after"], one["before"], atol=2e-5)
    assert two["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-4)
