"""Two ranks over gloo, with the base model sharded by FSDP2, train adapters as one process does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from adapter_ranks import config_of, follow, joined, two_ranks
from adapter_rows import largest_difference
from tiny_checkpoints import write_text_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VARIANTS = {
    "packed": ("learner=fsdp2", "learner.packing=true"),
    "padded": ("learner=fsdp2", "learner.packing=false", "learner.activation_checkpointing=blocks"),
}


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    base = write_text_policy(tmp_path / "model", "llama")
    for name in ("one", *VARIANTS):
        (tmp_path / name).mkdir()
    follow(config_of(base), 0, 1, tmp_path / "one")
    words = "resources.learner.num_workers=2"
    configs = {name: config_of(base, words, *overrides) for name, overrides in VARIANTS.items()}
    mp.start_processes(two_ranks, args=(configs, tmp_path), nprocs=2, start_method="forkserver")
    one = torch.load(tmp_path / "one" / "seen-0.pt", weights_only=False)
    for name in VARIANTS:
        ranks = [torch.load(tmp_path / name / f"seen-{rank}.pt", weights_only=False) for rank in range(2)]
        for n, alone in enumerate(one["parts"]):
            results = joined([rank["parts"][n] for rank in ranks])
            for result, expected in zip(results, joined([alone]), strict=True):
                if result is None or expected is None:
                    assert result is expected
                    continue
                assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
                for own, of_one in zip(result.outputs, expected.outputs, strict=True):
                    np.testing.assert_allclose(own["logprobs"], of_one["logprobs"], atol=1e-5, rtol=0)
        for rank in ranks:
            for steps, of_one in zip(rank["steps"], one["steps"], strict=True):
                assert steps == [pytest.approx(metrics, rel=1e-4) for metrics in of_one]
            for adapter, factors in one["factors"].items():
                assert largest_difference(rank["factors"][adapter], factors) < 1e-5
                assert largest_difference(rank["factors"][adapter], ranks[0]["factors"][adapter]) == 0.0
