"""One learner rank that has a GPU to itself, in a process whose modules were imported before it sees the GPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from backend_run import config_of, train


def train_on_gpu(rank: int, num_ranks: int, words: tuple[str, ...], model: Path, out: Path) -> None:
    """`backend_run.train` on GPU number `rank`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # as Ray does; no import has begun CUDA
    torch.backends.cudnn.allow_tf32 = False
    ranks = ("learner=fsdp2", f"resources.learner.num_workers={num_ranks}") if num_ranks > 1 else ()
    train(config_of(model, *ranks, *words), rank, num_ranks, out)
