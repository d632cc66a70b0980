"""FSDP2 on one rank and on several computes what a learner without shards computes."""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.deploy.checks.gpu_check.context import Context, Figures
from mobula.deploy.checks.gpu_check.roles import Model, open_checkpoint, open_model, sampled_groups
from mobula.learner.learner import Learner

CLOSE = 2e-3  # of the gradient norm, relative; ranks sum in another order
WORDS = ("sampler=huggingface", "learner.adam_eps=1.0e-4", "resources.dtype=float32")
RANKS_ON_CPU = 2
MEET_S = 120.0


def run(context: Context) -> Figures:
    """One rank for each GPU; on a CPU two ranks."""
    model = open_model(context, *WORDS)
    [groups] = sampled_groups(model)
    norms = {"single": _update(model, groups)}
    for num_ranks in sorted({1, context.num_gpus if context.is_cuda else RANKS_ON_CPU}):
        own = (*WORDS, "learner=fsdp2", f"resources.learner.num_workers={num_ranks}")
        sharded = open_checkpoint(context, model.folder, *own)
        norms[f"ranks_{num_ranks}"] = _on_ranks(context, sharded, groups, num_ranks)
    assert norms["single"] > 0, "the step has no gradient"
    for norm in norms.values():
        assert abs(norm / norms["single"] - 1) <= CLOSE, f"gradient norms differ: {norms}"
    return norms


def _update(model: Model, groups: list[ScoredGroup]) -> float:
    """The gradient norm of one step in this process alone."""
    learner = model.learner()
    try:
        return learner.update(groups, 1).metrics["grad_norm"]
    finally:
        learner.close()


def _on_ranks(context: Context, model: Model, groups: list[ScoredGroup], num_ranks: int) -> float:
    """The gradient norm of one step of `num_ranks` ranks; this process is rank 0."""
    learner = Learner(model.config, 0, num_ranks, model.processor.media_token_ids)
    address = learner.rendezvous_address()
    others = [_started(context, model, groups, rank, num_ranks, address) for rank in range(1, num_ranks)]
    try:
        learner.connect(address)
        norm = learner.update(groups, 1).metrics["grad_norm"]
    finally:
        learner.close()
        for process in others:
            process.join(MEET_S)
            process.kill()
    codes = [process.exitcode for process in others]
    assert not any(codes), f"ranks after the first ended with {codes}"
    return norm


def _started(
    context: Context, model: Model, groups: list[ScoredGroup], rank: int, num_ranks: int, address: str
) -> BaseProcess:
    """Another rank in a process that sees its own GPU alone."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if context.is_cuda:
        listed = seen.split(",") if seen else [str(n) for n in range(context.num_gpus)]
        os.environ["CUDA_VISIBLE_DEVICES"] = listed[rank]
    try:
        process = get_context("spawn").Process(
            target=_rank, args=(context, model.folder, groups, rank, num_ranks, address), daemon=True
        )
        process.start()
    finally:
        if seen is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = seen
    return process


def _rank(context: Context, folder: Path, groups: list[ScoredGroup], rank: int, num_ranks: int, address: str) -> None:
    own = (*WORDS, "learner=fsdp2", f"resources.learner.num_workers={num_ranks}")
    model = open_checkpoint(context, folder, *own)
    learner = Learner(model.config, rank, num_ranks, model.processor.media_token_ids)
    learner.connect(address)
    learner.update(groups, 1)
    learner.close()
