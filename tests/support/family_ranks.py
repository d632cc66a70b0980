"""One update of a mixed batch by one or two ranks, for every family in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from backend_run import config_of, connected, leave, weights
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


BACKENDS = {
    "fsdp2": ("learner=fsdp2",),
    "halves": ("learner=fsdp2", "learner.sequence_parallel=2"),
    "exchanged": ("learner=fsdp2",),  # after every micro-batch, of which some have no medium
    "zero3": ("learner=deepspeed", "learner.zero_stage=3"),
}


def update_all(rank: int, backend: str, names: Sequence[str], models: Path, out: Path) -> None:
    """Train each model of `names` for a step, alone or on two ranks of a backend; rank 0 writes its weights and metrics
    to `out`/NAME.pt."""
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0  # every block is a unit
    if backend == "exchanged":
        native.MAX_WHOLE_GRADIENT_BYTES = 0
    world_size = 2 if backend in BACKENDS else 1
    for name in names:
        family = family_at(str(models / name))
        undecided = config_of(
            models / name,
            "data.max_prompt_tokens=512",
            "sampler.max_images_per_prompt=3",
            f"sampler.max_audios_per_prompt={2 * isinstance(family, AudioFamily)}",
            f"sampler.max_videos_per_prompt={int(isinstance(family, VideoFamily))}",
            f"resources.learner.num_workers={world_size}",
            *BACKENDS.get(backend, ()),
        )
        config = with_row_layout(undecided)
        data = out / f"{name}-{rank}"
        data.mkdir(parents=True)
        learner = connected(Learner(config, rank, world_size, (250,)), rank, world_size, out / f"address-{name}")
        before = weights(learner)
        metrics = dict(learner.update(mixed(models / name, data), 1).metrics)
        seen = {"before": before, "after": weights(learner), "metrics": metrics}
        leave(learner, rank, seen, out / f"{name}.pt")
