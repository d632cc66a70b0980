"""A mixed step of two FSDP2 ranks, with rows of their own or a part of each row, equals one process's for every family.

No rank misses a vision call.
"""

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

UNSPLIT = ("qwen3.5", "gemma3")  # layers with a state, a mask for images: refused by name
NAMES = [name for name in TINY if name != "smolvlm" or importlib.util.find_spec("num2words")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below `1`, `2` and `halves`, what one process, two ranks and two ranks with a part of each row made of each
    model."""
    out = tmp_path_factory.mktemp("ranks")
    for name in NAMES:
        write_tiny(name, out / name, seed=1)
    multiprocessing.set_forkserver_preload(["family_ranks"])
    halved = [name for name in NAMES if name not in UNSPLIT]
    for case, number, names, num_sharing in (("1", 1, NAMES, 1), ("2", 2, NAMES, 1), ("halves", 2, halved, 2)):
        folder = out / case
        folder.mkdir()
        arguments = (number, names, out, folder, num_sharing)
        mp.start_processes(update_all, args=arguments, nprocs=number, start_method="forkserver")
    return out


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one(ran: Path, name: str) -> None:
    one, two = (torch.load(ran / number / f"{name}.pt") for number in ("1", "2"))
    assert equal(one["after"], two["after"], atol=2e-6)
    assert not equal(one["after"], one["before"], atol=2e-5)
    assert two["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNSPLIT])
def test_two_ranks_with_a_part_of_each_row_equal_one(ran: Path, name: str) -> None:
    one, halves = (torch.load(ran / case / f"{name}.pt") for case in ("1", "halves"))
    assert equal(one["after"], halves["after"], atol=1e-6)
    assert halves["metrics"] == pytest.approx(one["metrics"], rel=1e-5, abs=1e-6)
