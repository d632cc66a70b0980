"""What the training service calls: a learner and engines with many adapters on one frozen base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings


@dataclass(frozen=True)
class AdapterSpec:
    """A new adapter. `alpha / rank` scales the product of its factors. Rank 0: all weights of the model."""

    rank: int
    alpha: float
    seed: int  # of the first factors; the second factors are 0 at first
    trains_attention: bool = True
    trains_mlp: bool = True
    trains_unembedding: bool = False  # refused: engines serve no adapter of the unembedding

    @property
    def is_adapter(self) -> bool:
        return self.rank > 0

    @property
    def lora_rank(self) -> int | None:
        """The rank of an adapter; None for all weights."""
        return self.rank or None


@dataclass(frozen=True)
class LossRow:
    """A sequence and the inputs of its loss. `prompt` is the whole sequence, N tokens with expanded media. Position i
    predicts `target_tokens[i]`."""

    prompt: Prompt
    inputs: Mapping[str, np.ndarray]  # target_tokens int64 [N]; by loss weights, logprobs, advantages float32 [N]


@dataclass(frozen=True)
class LossCall:
    """One `forward` or `forward_backward` of an adapter."""

    adapter: str
    rows: Sequence[LossRow]
    loss: str  # name in the registry of losses
    options: Mapping[str, float] = field(default_factory=dict)
    has_backward: bool = True  # adds to the gradient that the next `step` applies


@dataclass(frozen=True)
class LossResult:
    """Outputs of a call: for each row name -> float32 [N], and metrics summed over the rows."""

    outputs: Sequence[Mapping[str, np.ndarray]]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class AdamParameters:
    """Settings of one step. `grad_clip_norm` of 0 does not clip; weight decay is decoupled (arXiv:1711.05101)."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class AdapterLearner(Protocol):
    """Trains adapters. Every adapter has its own gradient and its own optimizer state."""

    async def create(self, adapter: str, spec: AdapterSpec) -> None:
        """Adds an adapter.

        Raises:
            ValueError: an adapter has this name, or the spec fits no layer of the model.
        """

    async def compute(self, calls: Sequence[LossCall]) -> list[LossResult | Exception]:
        """Runs calls of one or several adapters as one batch. The failure of a call is its result alone."""

    async def step(self, adapter: str, parameters: AdamParameters) -> Mapping[str, float]:
        """Applies and clears the gradient; returns `grad_norm`, `skipped` (0 or 1) and `optimizer_steps` (of all).

        Raises:
            ValueError: the adapter does not exist, or has no gradient.
        """

    async def save(self, adapter: str, folder: Path) -> None:
        """Writes factors, gradient and optimizer state."""

    async def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        """Loads what `save` has written, in place of the adapter's state; clears its gradient without the optimizer.

        Raises:
            ValueError: the saved adapter has another rank, scale or other layers.
            CheckpointError: the folder holds no saved adapter.
        """

    async def export(self, adapter: str, folder: Path) -> None:
        """Writes the adapter in PEFT's format."""

    async def drop(self, adapter: str) -> None:
        """Removes an adapter, if there is one of this name."""


@dataclass(frozen=True)
class ScoredTokens:
    """Sampled tokens with their log-probs under the distribution they were sampled from."""

    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    stop_reason: str  # stop | length


@dataclass(frozen=True)
class SampleResult:
    """Samples of one prompt of P tokens. Log-probs of position 0 do not exist and are NaN."""

    samples: Sequence[ScoredTokens]
    prompt_logprobs: np.ndarray | None = None  # float32 [P], at temperature 1
    top_prompt_tokens: Sequence[Sequence[tuple[int, float]]] | None = None  # P lists of (token, log-prob), best first


@dataclass(frozen=True)
class SampleCall:
    """A prompt to sample from the weights of one adapter, or of the base model."""

    prompt: Prompt
    settings: SamplingSettings
    adapter: str | None = None  # name of served weights; None: the base model
    stop_token_ids: tuple[int, ...] = ()
    has_prompt_logprobs: bool = False
    num_top_prompt_tokens: int = 0


class AdapterEngines(Protocol):
    """Engines that serve several adapters in one batch. Served weights never change: new weights get a new name."""

    async def serve(self, adapter: str, folder: Path) -> None:
        """Makes an adapter in PEFT's format available on all engines, also on those that start later."""

    async def withdraw(self, adapter: str) -> None: ...

    async def sample(self, call: SampleCall) -> SampleResult: ...
