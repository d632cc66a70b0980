"""One update of text, one image, three images and a video by one or two ranks of a backend."""

from __future__ import annotations

from pathlib import Path

import torch
from backend_run import config_of, met_at, weights
from learner_data import group

from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.records.media import MediaStore
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.deploy.checks.parity import VIDEO, cases
from mobula.learner.backends import native
from mobula.learner.learner import Learner

SHOWN = ("text", "text", "text", "text", "one image", "several sizes", VIDEO, "image and video")
"""More groups of text than of media, so that one of two ranks may have no medium in a micro-batch."""
MEDIA = ("sampler.max_images_per_prompt=3", "sampler.max_videos_per_prompt=1", "data.max_prompt_tokens=512")
BACKENDS = {
    "one": (1, ()),
    "fsdp2": (2, ("learner=fsdp2", "resources.learner.num_workers=2")),
    "zero3": (2, ("learner=deepspeed", "learner.zero_stage=3", "resources.learner.num_workers=2")),
}
"""Ranks, and the words of the configuration."""


def mixed(config: RunConfig, data: Path) -> list[ScoredGroup]:
    """Two responses to each of `SHOWN`."""
    store = MediaStore(lambda media: media, config.data.media_cache_bytes)
    processor = ChatProcessor(config.policy.model, config.data, config.sampler, store, keep_files=False)
    found = cases(processor, data)
    answers = [[1, 2], [3, 4, 5]]
    return [group(found[name].prompt, answers, [n % 2, 1 - n % 2], n) for n, name in enumerate(SHOWN)]


def update(rank: int, backend: str, name: str, models: Path, out: Path) -> None:
    """Train `models`/`name` for a step; rank 0 writes weights and metrics to `out`/NAME.pt."""
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0  # every block is a unit
    native.MAX_WHOLE_GRADIENT_BYTES = 0  # exchanged after every micro-batch, of which some have no medium
    world_size, words = BACKENDS[backend]
    config = config_of(models / name, "policy.tiny=none", *MEDIA, *words)
    data = out / f"{name}-{rank}"
    data.mkdir(parents=True)
    learner = Learner(config, rank, world_size, (250,))
    learner.connect(met_at(learner, rank, out / f"address-{name}") if world_size > 1 else "")
    before = weights(learner)
    metrics = dict(learner.update(mixed(config, data), 1).metrics)
    after = weights(learner)
    if rank == 0:
        torch.save({"before": before, "after": after, "metrics": metrics}, out / f"{name}.pt")
    learner.close()
