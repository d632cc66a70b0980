"""`mobula train experiment=calculator` with real engines, in short: episodes through the whole loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jobs import Job

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    """One vLLM engine and two FSDP2 ranks; few seeds, and a short warm start."""
    folder = tmp_path_factory.mktemp("calculator")
    words = ("experiment=calculator", "resources=laptop", "num_steps=3", "algorithm.drop_uniform_groups=false")
    few = ("environment.num_train=64", "environment.num_validation=8", "environment.num_test=8")
    short = ("warm_start.num_steps=10", "warm_start.check_interval=10", "resources.rollout.num_workers=1")
    with Job(folder, (*words, *few, *short)) as job:
        job.finish(job.start())
        yield read_run_folder(job.run_folder)


def test_the_run_ends_and_engine_and_learner_agree_on_every_sampled_token(report: RunFolder) -> None:
    assert (report.summary.status, report.summary.version) == ("done", 3)
    assert report.summary.logprob_gap_max <= 1e-3
