"""The reward function `vllm_judge` on a real engine of a tiny model; call these in a process of their own."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mobula.cluster.errors import EngineLostError
from mobula.rewards.contract import Outcome, RewardRequest, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import InTime
from mobula.rewards.models.vllm_judge import VllmJudge
from mobula.rewards.tools import Tools

ENGINE = {
    "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, "enforce_eager": True, "max_num_seqs": 8,
    "max_num_batched_tokens": 1024, "limit_mm_per_prompt": {"image": 2, "video": 0},
}  # fmt: skip
OF_ANY_JUDGE: dict[str, Any] = {
    "system": None, "template": "{question} {response}", "images": "prompt", "verdict": r"regex:Score: (?P<score>\d)",
    "minimum": 1, "maximum": 5, "max_tokens": 16, "temperature": 0,
    "extra": {"structured_outputs": {"regex": "Score: [1-5]"}}, "question_pattern": None,
}  # fmt: skip
OPTIONS: dict[str, Any] = {**OF_ANY_JUDGE, "engine": ENGINE}


@cache
def tools() -> Tools:
    """What every call in this process has, and so the engine."""
    return Tools(None, "cpu", "float32", InTime(timeout_s=60))  # type: ignore[arg-type]


def judge(model: Path, **options: Any) -> VllmJudge:
    return build_function("vllm_judge", {**OPTIONS, "model": str(model), **options}, tools())  # type: ignore[return-value]


def outcomes(model: Path, requests: Sequence[RewardRequest], **options: Any) -> Sequence[Outcome]:
    return evaluate_batch(judge(model, **options), requests)


def refusal(model: Path, own: Tools | None = None, **options: Any) -> str:
    """Why a judge with these options is not built, by default by tools of its own."""
    own = own or Tools(None, "cpu", "float32")  # type: ignore[arg-type]
    try:
        build_function("vllm_judge", {**OPTIONS, "model": str(model), **options}, own)
    except ValueError as error:
        return str(error)
    return ""


def shared(model: Path) -> tuple[bool, bool, str]:
    """Whether two judges have one engine, whether torch is as it was, and why one with other options is refused."""
    before = torch.set_num_threads
    one, two = judge(model), judge(model, maximum=9)
    refused = refusal(model, tools(), engine={**ENGINE, "max_num_seqs": 4})
    return one._engine is two._engine, torch.set_num_threads is before, refused


def late(model: Path, requests: Sequence[RewardRequest]) -> tuple[Sequence[Outcome], int, Sequence[Outcome]]:
    """The outcomes where the engine's thread is busy elsewhere past the deadline, what hangs then, and those after."""
    function, released = judge(model), threading.Event()
    function._engine._thread.submit(released.wait)
    tools().in_time.deadline = time.monotonic() + 0.3
    found = evaluate_batch(function, requests)
    tools().in_time.deadline = float("inf")
    num_stuck = tools().in_time.num_stuck
    released.set()
    return found, num_stuck, evaluate_batch(function, requests)


def lost(model: Path, requests: Sequence[RewardRequest]) -> tuple[str, str, bool]:
    """The errors of two batches, the first of which meets a fault of the engine; whether they travel. It ends here."""
    function, found = judge(model), []
    core = function._engine._llm.llm_engine.engine_core

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    get_output, core.get_output = core.get_output, fail
    for _ in range(2):
        try:
            evaluate_batch(function, requests)
        except EngineLostError as error:
            found.append(error)
        core.get_output = get_output
    sent = [pickle.loads(pickle.dumps(error)) for error in found]
    return str(found[0]), str(found[1]), [e.failure for e in sent] == [e.failure for e in found]
