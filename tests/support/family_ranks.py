"""One update of a mixed batch by one or two ranks, for every family in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from backend_run import config_of, met_at, weights
from learner_data import group
from scored_rows import family_prompts

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.deploy.preflight.decisions import with_row_layout
from mobula.learner.backends import native
from mobula.learner.learner import Learner
from mobula.learner.policies.families import family_at
from mobula.learner.policies.families.base import AudioFamily, VideoFamily


def mixed(folder: Path, data: Path) -> list[ScoredGroup]:
    """Text, one image, several of different sizes, one twice, one at the end, and of families with them a video, a
    image with a video, and sounds; as many groups of text as of media, so that one of two ranks may have none."""
    prompts = [case.prompt for case in family_prompts(folder, data).cases.values()]
    text = [prompts[0]] * max(1, len(prompts) - 1)
    answers = [[1, 2], [3, 4, 5]]
    return [group(p, answers, [float(n % 2), 1.0 - n % 2], n) for n, p in enumerate([*text, *prompts[1:]])]


def update_all(rank: int, world_size: int, names: Sequence[str], models: Path, out: Path, num_sharing: int = 1) -> None:
    """Train each model of `names` for a step; rank 0 writes its weights to `out`/NAME.pt.

    `num_sharing` ranks share the tokens of a row.
    """
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0  # every block is a unit
    for name in names:
        family = family_at(str(models / name))
        ranks = (f"resources.learner.num_workers={world_size}", f"learner.sequence_parallel={num_sharing}")
        words = ("learner=fsdp2", *ranks) if world_size > 1 else ()
        undecided = config_of(
            models / name,
            "data.max_prompt_tokens=512",
            "sampler.max_images_per_prompt=3",
            f"sampler.max_audios_per_prompt={2 * isinstance(family, AudioFamily)}",
            f"sampler.max_videos_per_prompt={int(isinstance(family, VideoFamily))}",
            *words,
        )
        config = with_row_layout(undecided)
        data = out / f"{name}-{rank}"
        data.mkdir(parents=True)
        learner = Learner(config, rank, world_size, (250,))
        learner.connect(met_at(learner, rank, out / f"address-{name}") if world_size > 1 else "")
        before = weights(learner)
        metrics = dict(learner.update(mixed(models / name, data), 1).metrics)
        after = weights(learner)
        if rank == 0:
            torch.save({"before": before, "after": after, "metrics": metrics}, out / f"{name}.pt")
        learner.close()
