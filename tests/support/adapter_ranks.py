"""What one rank does in the test of adapters on two ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from adapter_rows import ADAM, OTHER, SPEC, call_of, factors_of, rows_of
from backend_run import met_at
from learner_data import tiny_config

from mobula.cluster.training_service.interfaces import LossCall, LossResult
from mobula.configs.schema import RunConfig
from mobula.learner.adapters.adapter import PartialResult
from mobula.learner.adapters.ranks import AdapterRank
from mobula.learner.backends import native


def config_of(model: Path, *overrides: str) -> RunConfig:
    return tiny_config(model, "learner.tokens_per_microbatch=60", *overrides)


def follow(config: RunConfig, rank: int, world_size: int, out: Path) -> None:
    """Trains two adapters, saves and loads in between, and writes what this rank saw."""
    adapters = AdapterRank(config, rank, world_size)
    adapters.connect(met_at(adapters, rank, out / "address") if world_size > 1 else "")
    adapters.create("a", SPEC)
    adapters.create("b", OTHER)
    seen: dict = {"parts": [], "steps": []}
    bad = LossCall("b", [], "cross_entropy")
    for n in range(3):
        short = LossCall("b", rows_of(50 + n, num=1), "cross_entropy")  # fewer rows than ranks
        calls = [call_of("a", n), short, bad, call_of("a", 20 + n, has_backward=False)]
        seen["parts"].append(adapters.compute(calls))
        if n == 1:  # with gradients that no step has applied
            adapters.save("a", out / "state")
            adapters.load("a", out / "state", with_optimizer=True)
        seen["steps"].append([adapters.step(name, ADAM) for name in ("a", "b")])
    seen["parts"].append(adapters.compute([short]))
    seen["factors"] = {name: factors_of(adapters, name) for name in ("a", "b")}
    torch.save(seen, out / f"seen-{rank}.pt")
    adapters.close()


def two_ranks(rank: int, configs: dict[str, RunConfig], out: Path) -> None:
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0  # every block is a unit
    for name, config in configs.items():
        follow(config, rank, 2, out / name)


def joined(parts: list[list[PartialResult | Exception]]) -> list[LossResult | None]:
    """The results of all calls from the parts of all ranks; None for a failed call."""
    results: list[LossResult | None] = []
    for of_ranks in zip(*parts, strict=True):
        failed = [isinstance(part, Exception) for part in of_ranks]
        assert all(failed) or not any(failed), "ranks agree on the calls that failed"
        results.append(None if failed[0] else PartialResult.joined(of_ranks))
    return results
