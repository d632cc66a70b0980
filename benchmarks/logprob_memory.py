"""Log-probs in chunks over log-probs of all tokens at once: peak memory and time of a forward and a backward pass.

Both sides have one text-only model of random weights that recomputes its blocks, each in a process of its own. Plain is
transformers' forward, log-probs of its logits, and autograd.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements, interleave
from benchmarks.harness.peak_memory import peak_bytes, restart_peak
from mobula.cluster.records.media import MediaReader
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import PLAIN, token_logprobs
from mobula.learner.policies.token import TokenPolicy

ROW_TOKENS, NUM_ROWS, QUICK_ROWS = 1024, 2, 1
CHUNK_TOKENS = 256
VOCABULARY = 32_768
WIDTH, NUM_BLOCKS = 256, 16  # the output layer has two fifths of the parameters; of Qwen2.5-0.5B, a quarter
MAX_MEMORY, MAX_TIME = 0.5, 1.25
TOLERANCE = 1e-4  # of a gradient that both sides compute, as a share of it
UNIT = "passes/s"


@dataclass(frozen=True)
class Pass:
    """Do one forward and one backward pass over so many rows."""

    num_rows: int


@dataclass(frozen=True)
class Done:
    """Measurements of one pass, and a number that both sides must agree on."""

    seconds: float  # of the CPU, which does not count those of other processes; on a GPU by the clock
    peak_bytes: int  # beyond the parameters
    gradient: float  # sum of |gradient| over all parameters


class Passes:
    """One side, in a process of its own."""

    def __init__(self, is_chunked: bool, device: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._device = torch.device(device)
        self._is_chunked = is_chunked
        self._model = _model().to(self._device)
        self._policy = TokenPolicy(self._model, _config()) if is_chunked else None
        self._clock = time.perf_counter if self._device.type == "cuda" else time.process_time

    def __call__(self, job: Pass) -> Done:
        ids = np.random.default_rng(0).integers(0, VOCABULARY, size=(job.num_rows, ROW_TOKENS)).astype(np.int32)
        before = self._restart_peak()
        started = self._clock()
        self._logprobs(ids).mean().backward()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds, peak = self._clock() - started, self._peak() - before
        gradient = sum(p.grad.abs().sum().item() for p in self._model.parameters() if p.grad is not None)
        self._model.zero_grad()
        return Done(seconds, peak, gradient)

    def _logprobs(self, ids: np.ndarray) -> Tensor:
        if self._policy is not None:
            rows = [TokenSequence(row, 1, (), ()) for row in ids]
            return self._policy(collate(rows, MediaReader(timeout_s=1, max_items=1), self._device), PLAIN).logprobs
        tokens = torch.from_numpy(ids).long().to(self._device)
        logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return token_logprobs(logits, tokens[:, 1:], PLAIN).logprobs

    def _restart_peak(self) -> int:
        """Bytes in use now, from which the peak is measured."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        return restart_peak()

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_bytes()


def _config() -> LearnerConfig:
    return load_config(["experiment=digits", f"learner.logprob_chunk_tokens={CHUNK_TOKENS}"]).learner


def _model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Both sides in turn."""
    device = load_config(overridden(["experiment=digits"], overrides)).resources.device
    num_rows = QUICK_ROWS if effort == QUICK else NUM_ROWS
    env = {"OMP_NUM_THREADS": "1"}
    with (
        apart(Passes, True, device, env=env) as chunked,
        apart(Passes, False, device, env=env) as plain,
    ):
        sides = {"chunked": _Measured(chunked, num_rows), "plain": _Measured(plain, num_rows)}
        found = asyncio.run(interleave(sides, effort))
    return _findings(found, sides, num_rows * ROW_TOKENS)


class _Measured:
    """Measures one side and keeps what its passes were."""

    def __init__(self, peer: Peer[Pass, Done], num_rows: int) -> None:
        self._peer = peer
        self._num_rows = num_rows
        self.passes: list[Done] = []

    async def __call__(self, round_number: int) -> float:
        done = await asyncio.to_thread(self._peer.ask, Pass(self._num_rows))
        self.passes.append(done)
        return 1 / done.seconds

    @property
    def peak_bytes(self) -> int:
        return max(done.peak_bytes for done in self.passes)


def _findings(found: dict[str, tuple[float, ...]], sides: dict[str, _Measured], num_tokens: int) -> Findings:
    gradients = [side.passes[-1].gradient for side in sides.values()]
    assert abs(gradients[0] - gradients[1]) <= TOLERANCE * gradients[1], f"the sides computed {gradients}"
    what = {
        "chunked": f"forward and backward of {num_tokens} tokens, logits of {CHUNK_TOKENS} at a time",
        "plain": f"forward and backward of {num_tokens} tokens, all logits at once",
    }
    series = {name: Measurements(words, UNIT, found[name]) for name, words in what.items()}
    peaks = {name: side.peak_bytes for name, side in sides.items()}
    claims = (
        Claim("peak memory: chunked / plain", peaks["chunked"] / peaks["plain"], MAX_MEMORY, at_least=False),
        Claim("time: chunked / plain", series["plain"].median / series["chunked"].median, MAX_TIME, at_least=False),
    )
    settings = {
        "num_tokens": num_tokens,
        "chunk_tokens": CHUNK_TOKENS,
        "width": WIDTH,
        "blocks": NUM_BLOCKS,
        "vocabulary": VOCABULARY,
        "peak_gb": {name: round(peak / 1e9, 3) for name, peak in peaks.items()},
    }
    return Findings(settings, series, claims)
