"""A prompt computed once for its responses, over packed rows that each compute it: speed and memory of a gradient.

Both sides have the same model of random weights, and compute forward and backward passes of the same rows in one
micro-batch: prompts of 64 and 1,500 tokens, two thirds of them images or all of them text, responses of 64 and 512
tokens, one and eight of a prompt. Images are encoded once for all rows on both sides.

On a GPU, in bfloat16: `python -m benchmarks shared_prompts resources=gpu_1`, or `python -m
benchmarks.shared_prompts resources=gpu_1`, which needs torch, transformers, pydantic and hydra alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from math import isqrt

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import FULL, QUICK, Claim, Effort, Findings, Measurements, Side, interleave, share
from benchmarks.harness.peak_memory import peak_bytes, restart_peak
from benchmarks.harness.text_model import text_model
from mobula.cluster.records.media import MediaHandle, MediaReader, MediaSpan, ProcessedMedia
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.token import TokenPolicy

KINDS, SIDES = ("text", "image"), ("shared", "packed")
PROMPTS, ANSWERS, SIBLINGS = (64, 1500), (64, 512), (1, 8)
STRICT = (1500, 64, 8)
MIN_SPEED, MAX_MEMORY, MIN_ALONE = 4.0, 0.4, 0.97
VOCABULARY, PATCH = 2048, 14
LEAST_TOKENS = {"cpu": 2048, "cuda": 16_384}  # of a pass
SIZES = {"cpu": (128, 8), "cuda": (1024, 16)}  # width and blocks
IMAGE_ID, VISION_START_ID = 7, 8
NUM_IMAGES = 2  # of a prompt
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}  # of the gradients that both sides compute, as a share of them
UNIT = "tokens/s"


@dataclass(frozen=True)
class Work:
    """Compute the gradient of some groups."""

    num_prompt_tokens: int
    num_answer_tokens: int
    num_siblings: int
    num_groups: int

    @classmethod
    def of(cls, prompt: int, answer: int, siblings: int, device: str) -> Work:
        return cls(prompt, answer, siblings, max(1, LEAST_TOKENS[device] // (siblings * (prompt + answer))))

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return self.num_groups * self.num_siblings * (self.num_prompt_tokens + self.num_answer_tokens)

    def __str__(self) -> str:
        return f"{self.num_prompt_tokens}/{self.num_answer_tokens}/{self.num_siblings}"


@dataclass(frozen=True)
class Done:
    seconds: float  # of the CPU, which does not count those of other processes; on a GPU by the clock
    peak_bytes: int  # beyond parameters and gradients
    gradient: float  # sum of |gradient| over all parameters


class Passes:
    """One side, in a separate process."""

    def __init__(self, kind: str, side: str, device: str, config: LearnerConfig) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._kind = kind
        self._is_cuda = device == "cuda"
        self._device = torch.device(device)
        self._config = config.model_copy(update={"share_prompts": side == "shared"})
        build = text_model if kind == "text" else _vision_model
        model = build(*SIZES[device], VOCABULARY)
        dtype = torch.bfloat16 if self._is_cuda else torch.float32
        self._policy = TokenPolicy(model.to(device=self._device, dtype=dtype), self._config)
        self._clock = time.perf_counter if self._is_cuda else time.process_time

    def __call__(self, work: Work) -> Done:
        rows, groups = _rows(work, self._kind)
        reader = MediaReader(timeout_s=1, max_items=NUM_IMAGES * work.num_groups)
        before = self._restart_peak()
        started = self._clock()
        [plan] = split_microbatches(rows, self._config, 1, groups)
        for microbatch in plan:
            batch = collate([rows[i] for i in microbatch], reader, self._device)
            (-self._policy(batch, PLAIN).logprobs.sum() / len(rows)).backward()
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        seconds, peak = self._clock() - started, self._peak_bytes() - before
        gradient = sum(p.grad.abs().sum().item() for p in self._policy.parameters() if p.grad is not None)
        self._policy.zero_grad(set_to_none=False)  # the next pass allocates no gradients
        return Done(seconds, peak, gradient)

    def _restart_peak(self) -> int:
        if not self._is_cuda:
            return restart_peak()
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._is_cuda else peak_bytes()


def _vision_model(width: int, num_blocks: int, vocabulary: int) -> PreTrainedModel:
    """A Qwen2.5-VL with the decoder of `text_model`. Its vision tower takes about two thirds of the decoder's time for
    the same tokens; by operations, a third at 7 B parameters of the released checkpoints, and four fifths at 3 B.
    """
    section = width // 8 // 4  # a head has width / 4 values, half of which are angles
    text = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [width // 8 - 2 * section, section, section],
        },
    }
    vision = {
        "depth": num_blocks // 2,
        "hidden_size": width // 4,
        "intermediate_size": 3 * width // 4,
        "num_heads": 2,
        "patch_size": PATCH,
        "window_size": 8 * PATCH,
        "fullatt_block_indexes": [num_blocks // 2 - 1],
        "out_hidden_size": width,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_ID,
        vision_start_token_id=VISION_START_ID,
        video_token_id=9,
        vision_end_token_id=10,
        dtype="float32",
        attn_implementation="sdpa",
    )
    return Qwen2_5_VLForConditionalGeneration(config).train()


def _rows(work: Work, kind: str) -> tuple[list[TokenSequence], list[int]]:
    """The rows, and the group of each."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(work.num_groups):
        prompt = rng.integers(16, VOCABULARY, work.num_prompt_tokens).astype(np.int32)
        media: tuple[MediaHandle, ...] = ()
        spans: tuple[MediaSpan, ...] = ()
        if kind == "image":
            side = isqrt(work.num_prompt_tokens // (3 * NUM_IMAGES // 2))
            starts = [1 + n * (1 + side**2) for n in range(NUM_IMAGES)]
            for start in starts:
                prompt[start], prompt[start + 1 : start + 1 + side**2] = VISION_START_ID, IMAGE_ID
            media = tuple(_image(NUM_IMAGES * group + n, 2 * side) for n in range(NUM_IMAGES))
            spans = tuple(MediaSpan(start + 1, start + 1 + side**2) for start in starts)
        for _ in range(work.num_siblings):
            answer = rng.integers(16, VOCABULARY, work.num_answer_tokens).astype(np.int32)
            rows.append(TokenSequence(np.concatenate([prompt, answer]), len(prompt), media, spans))
    return rows, [n // work.num_siblings for n in range(len(rows))]


def _image(seed: int, side: int) -> MediaHandle:
    """A random image of `side` x `side` patches; four of them are a token."""
    values = np.random.default_rng(seed).normal(size=(side**2, 3 * 2 * PATCH**2)).astype(np.float32)
    inputs = {"pixel_values": values, "image_grid_thw": np.array([[1, side, side]], dtype=np.int64)}
    media = ProcessedMedia("image", inputs)
    return MediaHandle(f"image-{seed}", "image", media.num_bytes, media, f"image-{seed}.png")


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Speed of both sides in turn, then memory in processes that return freed memory to the system at once."""
    words = ["experiment=digits", "learner.packing=true", f"learner.tokens_per_microbatch={10**6}"]
    config = load_config(overridden(words, overrides))
    device = config.resources.device
    shapes = [STRICT, (64, 64, 1)] if effort == QUICK else list(product(PROMPTS, ANSWERS, SIBLINGS))
    works = [Work.of(*shape, device) for shape in shapes]
    env = {"OMP_NUM_THREADS": "1"}
    names = [(kind, side) for kind in KINDS for side in SIDES]
    gradients: dict[tuple[str, str, str], float] = {}
    rates: dict[tuple[str, str, str], tuple[float, ...]] = {}
    with ExitStack() as stack:
        peers = {name: stack.enter_context(apart(Passes, *name, device, config.learner, env=env)) for name in names}
        for kind, work in product(KINDS, works):
            sides = {side: _side(peers[kind, side], work, gradients, (kind, str(work), side)) for side in SIDES}
            for side, values in asyncio.run(interleave(sides, effort)).items():
                rates[kind, str(work), side] = values
    peaks: dict[tuple[str, str, str], int] = {}
    with ExitStack() as stack:
        eager = {**env, "MALLOC_MMAP_THRESHOLD_": "65536"}
        peers = {name: stack.enter_context(apart(Passes, *name, device, config.learner, env=eager)) for name in names}
        for (kind, side), work in product(names, works):
            peers[kind, side].ask(work)
            peaks[kind, str(work), side] = peers[kind, side].ask(work).peak_bytes
    for kind, work in product(KINDS, works):
        shared, packed = (gradients[kind, str(work), side] for side in SIDES)
        assert abs(shared - packed) <= TOLERANCE[device] * packed, f"{kind} {work}: other gradients, {shared}, {packed}"
    return _findings(device, works, rates, peaks)


def _findings(
    device: str,
    works: Sequence[Work],
    rates: dict[tuple[str, str, str], tuple[float, ...]],
    peaks: dict[tuple[str, str, str], int],
) -> Findings:
    series = {
        f"{kind} {work} {side}": Measurements(f"prompt/response tokens/responses, {side}", UNIT, values)
        for (kind, work, side), values in rates.items()
    }
    claims = []
    alone = []
    for kind, work in product(KINDS, works):
        speed = share(*(rates[kind, str(work), side] for side in SIDES))
        shared, packed = (peaks[kind, str(work), side] for side in SIDES)
        is_strict = str(work) == "/".join(map(str, STRICT))
        claims += [
            Claim(f"{kind} {work}: speed", speed, MIN_SPEED if is_strict else None),
            Claim(f"{kind} {work}: peak memory", shared / packed, MAX_MEMORY if is_strict else None, False),
        ]
        if work.num_siblings == 1:
            alone.append(speed)
    claims.append(Claim("one response a prompt: lowest speed", min(alone), MIN_ALONE))
    width, num_blocks = SIZES[device]
    settings = {
        "width": width,
        "blocks": num_blocks,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "groups": {str(work): work.num_groups for work in works},
        "peak_mb": {" ".join(name): round(peak / 1e6, 1) for name, peak in peaks.items()},
    }
    return Findings(settings, series, tuple(claims))


def _side(
    peer: Peer[Work, Done], work: Work, gradients: dict[tuple[str, str, str], float], name: tuple[str, str, str]
) -> Side:
    async def side(round_number: int) -> float:
        done = await asyncio.to_thread(peer.ask, work)
        gradients[name] = done.gradient
        return work.num_tokens / done.seconds

    return side


if __name__ == "__main__":
    json.dump(asdict(measure(FULL, sys.argv[1:])), sys.stdout, indent=2)
