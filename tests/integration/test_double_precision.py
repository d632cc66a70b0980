"""Ranks that share rows differ from one process by rounding alone: in float64 the differences of float32 are gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backend_run import equal
from double_rank import JOBS, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("double_rank.py")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("double")
    write_model(out / "model")
    for num_ranks in (1, 2):
        at = out / str(num_ranks)
        words = [[str(rank), str(num_ranks), str(out / "model"), str(at)] for rank in range(num_ranks)]
        ranks = [subprocess.Popen([sys.executable, str(SCRIPT), *own]) for own in words]
        assert [rank.wait(500) for rank in ranks] == [0] * num_ranks
    return out


@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_that_share_rows_equal_one_process(ran: Path, job: str) -> None:
    one, two = (torch.load(ran / num_ranks / job / "seen.pt") for num_ranks in ("1", "2"))
    before, after = ("policy_before", "policy") if job == "critic" else ("before", "weights")
    assert all(tensor.dtype == torch.float64 for tensor in one[after].values())
    assert not equal(one[after], one[before], atol=1e-4)
    assert equal(two[after], one[after], atol=1e-10)
    if job == "critic":
        torch.testing.assert_close(two["values"], one["values"], atol=1e-10, rtol=0)
        assert (one["values"] - one["start"]).abs().max() > 1e-2
