"""Ranks over gloo that shard all weights of a training service's model train as one process does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from adapter_ranks import joined
from full_weights_ranks import ALL, config_of, continued, follow, follow_on_ranks
from safetensors.torch import load_file

from mobula.learner.adapters.ranks import FullWeightsRank
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VARIANTS = {
    "two": (2, ()),
    "four": (4, ("learner.packing=false",)),
    "two, gradients sharded": (2, ("learner.activation_checkpointing=blocks",)),
    "two replicas": (4, ("resources.learner.replicas=2", "learner.activation_checkpointing=blocks")),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and what one process made of it below `one`."""
    out = tmp_path_factory.mktemp("full")
    model = write_tiny_qwen2_5_vl(out / "model", seed=0)
    (out / "one").mkdir()
    follow(config_of(model), 0, 1, out / "one")
    return out


@pytest.mark.parametrize(
    "name", ["two", "four", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list(VARIANTS)[2:])]
)
def test_ranks_equal_one_process(ran: Path, name: str) -> None:
    number, overrides = VARIANTS[name]
    out = ran / name
    out.mkdir()
    words = ("learner=fsdp2", f"resources.learner.num_workers={number}", *overrides)
    config = config_of(ran / "model", *words)
    mp.start_processes(
        follow_on_ranks, args=(config, number, out, ran / "one" / "state"), nprocs=number, start_method="forkserver"
    )
    one = torch.load(ran / "one" / "seen-0.pt", weights_only=False)
    ranks = [torch.load(out / f"seen-{rank}.pt", weights_only=False) for rank in range(number)]
    for n, alone in enumerate(one["parts"]):
        results = joined([rank["parts"][n] for rank in ranks])
        for result, expected in zip(results, joined([alone]), strict=True):
            if result is None or expected is None:
                assert result is expected
                continue
            assert result.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)
            for own, of_one in zip(result.outputs, expected.outputs, strict=True):
                np.testing.assert_allclose(own["logprobs"], of_one["logprobs"], atol=1e-5, rtol=0)
    for rank in ranks:
        assert rank["steps"] == [pytest.approx(metrics, rel=1e-4) for metrics in one["steps"]]
        assert rank["continued"] == [pytest.approx(metrics, rel=1e-4) for metrics in one["steps"][1:]]
    exported, expected, initial = (
        load_file(folder / "model.safetensors") for folder in (out / "export", ran / "one" / "export", ran / "model")
    )
    assert exported.keys() == expected.keys()
    assert max(float((exported[key] - expected[key]).abs().max()) for key in expected) < 1e-5
    assert max(float((initial[key] - expected[key]).abs().max()) for key in expected) > 1e-2, "the weights have moved"
    assert sum(rank["share"] for rank in ranks) == pytest.approx(config.resources.learner.replicas), "copies are shards"

    back = FullWeightsRank(config_of(ran / "model"), 0, 1)
    back.connect("")
    back.create("a", ALL)
    assert continued(back, out / "state") == [pytest.approx(metrics, rel=1e-4) for metrics in one["steps"][1:]]
