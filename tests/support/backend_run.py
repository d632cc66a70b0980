"""What one rank does in the tests of the backends: a supervised step, updates, a checkpoint and the way back to it."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from learner_data import group, image, prompt, random_groups, tiny_config
from one_learner import at_hand, copied
from transformers import AutoTokenizer

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import ScoredGroup, TrajectoryGroup, WeightSpan
from mobula.configs.schema import RunConfig
from mobula.learner.examples import Example
from mobula.learner.learner import Learner
from mobula.learner.policies.adapters import PEFT_PREFIX, is_factor, split_factor

Ranked = TypeVar("Ranked", bound=Any)
LORA = ("policy.lora.rank=4", "policy.lora.alpha=64.0")


def steps(tokenizer) -> list[list[ScoredGroup]]:
    """Two updates. In the first one rank gets all the text and the other all the images; the second is uneven."""
    text = [group(prompt(tokenizer, f"t{n}"), [[1, 2], [3, 4]], [1.0, 0.0], n) for n in range(3)]
    images = [group(prompt(tokenizer, f"p{n}", [image(n)]), [[5, 6], [7]], [0.0, 1.0], n) for n in range(3)]
    return [text + images, random_groups(tokenizer, 3, 3, seed=5)]


def train(config: RunConfig, rank: int, world_size: int, out: Path) -> None:
    """Everything that `follow` does, on one rank; rank 0 writes what it saw."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    learner = connected(Learner(config, rank, world_size, (250,)), rank, world_size, out / "address")
    leave(learner, rank, follow(learner, steps(tokenizer), tokenizer, out), out / "seen.pt")


def train_on_gpu(rank: int, num_ranks: int, words: tuple[str, ...], model: Path, out: Path) -> None:
    """`train` on GPU number `rank`, in a process whose modules were imported before it sees the GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # as Ray does; no import has begun CUDA
    torch.backends.cudnn.allow_tf32 = False
    ranks = ("learner=fsdp2", f"resources.learner.num_workers={num_ranks}") if num_ranks > 1 else ()
    train(config_of(model, *ranks, *words), rank, num_ranks, out)


def connected(learner: Ranked, rank: int, world_size: int, path: Path) -> Ranked:
    """The learner, or another rank, once it has met the others at the address of rank 0, which a file passes on."""
    if rank == 0:
        path.with_suffix(".part").write_text(learner.rendezvous_address() if world_size > 1 else "")
        path.with_suffix(".part").rename(path)
    while not path.exists():
        time.sleep(0.01)
    learner.connect(path.read_text())
    return learner


def leave(learner: Learner, rank: int, seen: object, path: Path) -> None:
    """Rank 0 writes what it saw; the ranks part."""
    if rank == 0:
        torch.save(seen, path)
    learner.close()


def follow(learner: Learner, updates: list[list[ScoredGroup]], tokenizer, out: Path) -> dict:
    """A supervised step, save, two updates, save, a third update; load, the third update again, and one that is not
    finite; then back to the first checkpoint."""
    answer = updates[0][0].group.trajectories[0].actions.token_ids
    asked = prompt(tokenizer, "canary", [image(9)])
    rows = [Example.of_answer(one, TokenActions(answer), answer > 0) for one in (asked, prompt(tokenizer, "t"))]
    seen = {"before": weights(learner)}
    seen |= {"supervised": learner.supervised_step(at_hand(rows)), "accuracy": learner.answer_accuracy(at_hand(rows))}
    learner.save(out / "start")
    seen["start"] = weights(learner)
    fresh = [(), (of_version(updates[0][-1].group, 1),)]
    seen["metrics"] = [updated(learner, groups, n + 1, fresh[n]) for n, groups in enumerate(updates)]
    seen |= {"weights": weights(learner), "canary": torch.from_numpy(learner.sequence_logprobs(asked))}
    learner.save(out / "state")
    learner.export(out / "export")
    seen["factors"] = factors(learner)
    learner.update(updates[0], 3)
    seen["third"] = weights(learner)
    seen["version"] = learner.load(out / "state")
    seen |= {"reloaded": weights(learner), "canary_reloaded": torch.from_numpy(learner.sequence_logprobs(asked))}
    learner.update(updates[0], 3)
    seen["third_again"] = weights(learner)
    seen["skipped"] = learner.update([group(asked, [[1], [2]], [math.inf, 0.0])], 4).metrics["skipped"]
    seen["not_finite"] = weights(learner)
    learner.load(out / "start")
    seen["start_again"] = weights(learner)
    seen["metrics_again"] = [updated(learner, groups, n + 1, fresh[n]) for n, groups in enumerate(updates)]
    return seen


def followed(
    config: RunConfig,
    rank: int,
    world_size: int,
    out: Path,
    updates: list[tuple[list[ScoredGroup], dict]],
    *,
    banned_ids: tuple[int, ...] = (),
    assesses: bool = False,
) -> None:
    """Two steps, a checkpoint, a third step; back to the checkpoint, and the third step again. Rank 0 writes what it
    saw."""
    learner = connected(Learner(config, rank, world_size, banned_ids), rank, world_size, out / "address")

    def update(version: int) -> dict[str, float]:
        groups, more = updates[version - 1]
        return dict(learner.update(groups, version, **more).metrics)

    seen = {"before": weights(learner), "assessed": dict(learner.assess(updates[2][0])) if assesses else {}}
    seen |= {"metrics": [update(1), update(2)], "weights": weights(learner)}
    learner.save(out / "state")
    learner.finish_save()
    update(3)
    seen["third"] = weights(learner)
    learner.load(out / "state")
    update(3)
    seen["third_again"] = weights(learner)
    leave(learner, rank, seen, out / "seen.pt")


def without_sharing(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics that do not depend on the number of ranks: siblings on two ranks share less of their prompts, and padded
    rows share none."""
    return {name: value for name, value in metrics.items() if name != "shared_prompt_share"}


def updated(
    learner: Learner, groups: list[ScoredGroup], version: int, fresh: tuple[TrajectoryGroup, ...]
) -> dict[str, float]:
    """Metrics of one update, whose log-prob gap is measured on `fresh` where its own groups are older."""
    return dict(learner.update(groups, version, fresh=fresh).metrics)


def of_version(sampled: TrajectoryGroup, version: int) -> TrajectoryGroup:
    """The group as if it had been sampled with these weights."""
    trajectories = (replace(t, weight_spans=(WeightSpan(version, 0, t.num_steps),)) for t in sampled.trajectories)
    return replace(sampled, trajectories=tuple(trajectories))


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in copied(learner).items()}


def factors(learner: Learner) -> dict[str, torch.Tensor]:
    """Adapters under the names that PEFT gives to them in a file; none without adapters."""
    named = ((split_factor(name), tensor) for name, tensor in learner.backend.full_state(is_factor))
    return {f"{PEFT_PREFIX}{module}.{factor}": tensor.cpu().clone() for (module, factor), tensor in named}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> bool:
    assert a.keys() == b.keys()
    return all(torch.allclose(a[name], b[name], atol=atol, rtol=0) for name in a)


def config_of(model: Path, *overrides: str) -> RunConfig:
    """A large `adam_eps`: at 1e-8 Adam turns the rounding of a gradient near 0 into a step as large as the learning
    rate.

    All groups are of version 0, so that one is trained however old it is.
    """
    rates = ("learner.learning_rate=0.001", "warm_start.learning_rate=0.001", "learner.adam_eps=1.0e-4")
    return tiny_config(model, "learner.tokens_per_microbatch=120", "algorithm.max_staleness=4", *rates, *overrides)
