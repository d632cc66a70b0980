"""Training in plain transformers and torch: one process, micro-batches of similar lengths, gradient accumulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.harness.apart import Peer, apart
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.schema import RunConfig
from mobula.learner.policies.checkpoint import load_policy_model

IMAGE_TOKEN_TYPE = 1  # what transformers' mm_token_type_ids calls an image placeholder
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Rows:
    """forward() arguments of [B] sequences, right-padded, and which tokens are responses."""

    inputs: dict[str, np.ndarray]
    is_response: np.ndarray  # bool [B, S]


@dataclass(frozen=True)
class StepJob:
    """Take `num_steps` optimizer steps on the same micro-batches with `num_threads` threads."""

    batches: Sequence[Rows]
    num_threads: int
    num_steps: int

    @property
    def num_targets(self) -> int:
        """Response tokens of one step."""
        return sum(int(rows.is_response.sum()) for rows in self.batches)

    @property
    def padded_share(self) -> float:
        """Of all positions that one step computes."""
        attended = [rows.inputs["attention_mask"] for rows in self.batches]
        return 1 - sum(int(mask.sum()) for mask in attended) / sum(mask.size for mask in attended)


def microbatches_of(
    prompts: Sequence[Prompt], responses: Sequence[Sequence[np.ndarray]], reader: MediaReader, max_tokens: int
) -> list[Rows]:
    """Prompts with each of their responses, sorted by length, in micro-batches of at most `max_tokens` padded tokens
    (or a single longer sequence)."""
    pairs = [(prompt, tokens) for prompt, siblings in zip(prompts, responses, strict=True) for tokens in siblings]
    pairs.sort(key=_length, reverse=True)
    batches = []
    while pairs:
        size = max(1, max_tokens // _length(pairs[0]))
        batches.append(_rows(pairs[:size], reader))
        pairs = pairs[size:]
    return batches


def _length(pair: tuple[Prompt, np.ndarray]) -> int:
    prompt, tokens = pair
    return prompt.num_tokens + len(tokens)


def _rows(pairs: Sequence[tuple[Prompt, np.ndarray]], reader: MediaReader) -> Rows:
    """Each sibling is a row with images of its own, as transformers takes them."""
    width = max(map(_length, pairs))
    ids, attended, types = (np.zeros((len(pairs), width), dtype=np.int64) for _ in range(3))
    is_response = np.zeros((len(pairs), width), dtype=bool)
    for row, (prompt, tokens) in enumerate(pairs):
        end = prompt.num_tokens + len(tokens)
        ids[row, :end] = np.concatenate([prompt.expanded_ids, tokens])
        attended[row, :end] = 1
        is_response[row, prompt.num_tokens : end] = True
        for span in prompt.media_spans:
            types[row, span.start : span.end] = IMAGE_TOKEN_TYPE
    media = [reader.read(prompt.media) for prompt, _ in pairs]
    names = media[0][0].inputs if media[0] else ()
    images = {name: np.concatenate([m.inputs[name] for row in media for m in row]) for name in names}
    types_of_tokens = {"mm_token_type_ids": types} if images else {}
    return Rows({"input_ids": ids, "attention_mask": attended, **types_of_tokens, **images}, is_response)


def raw_trainer(config: RunConfig) -> AbstractContextManager[Peer[StepJob, float]]:
    """A process with all cores; a job's answer is the seconds of one step."""
    return apart(_build, config, env={})


def _build(config: RunConfig) -> Callable[[StepJob], float]:
    device = torch.device(config.resources.device)
    model = load_policy_model(config.policy, torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def accumulate(inputs: dict[str, torch.Tensor], is_target: torch.Tensor, num_targets: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.resources.dtype == "bfloat16"):
            logits = model(**inputs, use_cache=False).logits[:, :-1][is_target].float()  # [N, V]
        targets = inputs["input_ids"][:, 1:][is_target]  # [N]
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])
        (-logprobs.sum() / num_targets).backward()

    def step(batches: Sequence[tuple[dict[str, torch.Tensor], torch.Tensor]], num_targets: int) -> None:
        for inputs, is_target in batches:
            accumulate(inputs, is_target, num_targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    def steps(job: StepJob) -> float:
        torch.set_num_threads(job.num_threads)
        batches = [_on(device, rows) for rows in job.batches]
        started = time.perf_counter()
        for _ in range(job.num_steps):
            step(batches, job.num_targets)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / job.num_steps

    return steps


def _on(device: torch.device, rows: Rows) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """forward() arguments, and which tokens after the first are responses."""
    inputs = {name: torch.from_numpy(array).to(device) for name, array in rows.inputs.items()}
    return inputs, torch.from_numpy(rows.is_response[:, 1:]).to(device)
