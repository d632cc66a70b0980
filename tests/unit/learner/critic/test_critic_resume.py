"""A learner that is killed after some steps goes on to the very same policy, critic and KL coefficient."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import pytest
import torch
from killed_learner import NUM_STEPS, follow

from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def finished(model: Path, folder: Path, kill_after: int = 0) -> int:
    """The exit code of a process that follows the steps."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_learner"])
    process = context.Process(target=follow, args=(model, folder, kill_after))
    process.start()
    process.join(600)
    return process.exitcode


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert finished(model, folder) == 0
    return torch.load(folder / "end.pt")


def same(a: object, b: object) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(("kill_after", "begun_at"), [(1, 0), (3, 2), pytest.param(4, 4, marks=pytest.mark.exhaustive)])
def test_a_killed_learner_goes_on_bit_for_bit(
    model: Path, uninterrupted: dict, tmp_path: Path, kill_after: int, begun_at: int
) -> None:
    """LightRFT defect B10: neither optimizers nor the KL controller were saved."""
    assert finished(model, tmp_path, kill_after) == -signal.SIGKILL
    assert finished(model, tmp_path) == 0
    found = torch.load(tmp_path / "end.pt")
    assert found["begun_at"] == begun_at
    assert found["metrics"] == {v: m for v, m in uninterrupted["metrics"].items() if v > begun_at}
    assert same(found["models"], uninterrupted["models"])
    assert same(found["optimizers"], uninterrupted["optimizers"])


def test_there_was_something_to_lose(uninterrupted: dict) -> None:
    metrics = uninterrupted["metrics"]
    coefficients = [metrics[version]["kl_coef"] for version in range(1, NUM_STEPS + 1)]
    assert coefficients[0] == coefficients[1] == 0.1, "nothing was observed while the critic trained alone"
    assert len(set(coefficients[1:])) == NUM_STEPS - 1
    assert len({metrics[version]["value_loss"] for version in metrics}) == NUM_STEPS
    assert [metrics[version]["learning_rate"] > 0 for version in metrics] == [False, True, True, True, True]
