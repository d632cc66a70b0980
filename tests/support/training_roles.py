"""A learner and engines of the training service in one process, with a tiny real model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mobula.cluster.training_service.interfaces import (
    AdamParameters,
    AdapterSpec,
    LossCall,
    LossResult,
    SampleCall,
    SampleResult,
    ScoredTokens,
)

VOCABULARY, WIDTH = 32, 16
END = VOCABULARY - 1


class TinyBase:
    """The frozen model: the logits of a position depend on its token and the one before."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.head = torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.2

    def logits(self, ids: torch.Tensor, factors: Mapping[str, torch.Tensor] | None, scale: float) -> torch.Tensor:
        """Returns [N, V]."""
        hidden = self.embedding[ids] + 0.5 * self.embedding[torch.roll(ids, 1)] * (torch.arange(len(ids)) > 0)[:, None]
        logits = hidden @ self.head.T
        if factors is not None:
            logits = logits + scale * (hidden @ factors["a"].T) @ factors["b"].T
        return logits


@dataclass
class _Adapter:
    scale: float
    factors: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    num_steps: int = 0


@dataclass
class TinyLearner:
    """Implements `AdapterLearner`. `failures` are raised by the next calls of `compute`."""

    base: TinyBase = field(default_factory=TinyBase)
    adapters: dict[str, _Adapter] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)  # adapters of each call of `compute`
    num_steps: int = 0
    delay_s: float = 0.0

    async def create(self, adapter: str, spec: AdapterSpec) -> None:
        if adapter in self.adapters:
            raise ValueError(f"adapter {adapter} exists")
        generator = torch.Generator().manual_seed(spec.seed)
        a = torch.randn(spec.rank, WIDTH, generator=generator) / WIDTH**0.5
        factors = {"a": a.requires_grad_(), "b": torch.zeros(VOCABULARY, spec.rank, requires_grad=True)}
        moments = {f"{name}.{n}": torch.zeros_like(f) for name, f in factors.items() for n in ("m", "v")}
        self.adapters[adapter] = _Adapter(spec.alpha / spec.rank, factors, moments)

    async def compute(self, calls: Sequence[LossCall]) -> list[LossResult | Exception]:
        await asyncio.sleep(self.delay_s)
        if self.failures:
            raise self.failures.pop(0)
        self.batches.append([call.adapter for call in calls])
        return [self._compute(call) for call in calls]

    def _compute(self, call: LossCall) -> LossResult | Exception:
        adapter = self.adapters[call.adapter]
        outputs, total = [], torch.zeros(())
        for row in call.rows:
            if 13 in row.prompt.expanded_ids:
                return ValueError("token 13 cannot be trained")
            ids = torch.from_numpy(row.prompt.expanded_ids.astype(np.int64))
            targets = torch.from_numpy(np.array(row.inputs["target_tokens"]))
            logprobs = self.base.logits(ids, adapter.factors, adapter.scale).log_softmax(-1)
            logprobs = logprobs.gather(1, targets[:, None])[:, 0]
            total = total + _loss(call, row.inputs, logprobs)
            outputs.append({"logprobs": logprobs.detach().numpy()})
        if call.has_backward:
            total.backward()
        return LossResult(outputs, {"loss": float(total.detach())})

    async def step(self, adapter: str, parameters: AdamParameters) -> Mapping[str, float]:
        held, p = self.adapters[adapter], parameters
        held.num_steps += 1
        self.num_steps += 1
        for name, factor in held.factors.items():
            gradient = torch.zeros_like(factor) if factor.grad is None else factor.grad
            m, v = held.moments[f"{name}.m"], held.moments[f"{name}.v"]
            m.mul_(p.beta1).add_(gradient, alpha=1 - p.beta1)
            v.mul_(p.beta2).addcmul_(gradient, gradient, value=1 - p.beta2)
            corrected = (v / (1 - p.beta2**held.num_steps)).sqrt() + p.eps
            with torch.no_grad():
                factor.sub_(p.learning_rate * (m / (1 - p.beta1**held.num_steps)) / corrected)
            factor.grad = None
        return {"step": float(held.num_steps)}

    async def save(self, adapter: str, folder: Path) -> None:
        held = self.adapters[adapter]
        gradients = {f"{n}.g": f.grad if f.grad is not None else torch.zeros_like(f) for n, f in held.factors.items()}
        state = {**held.factors, **held.moments, **gradients, "step": torch.tensor(held.num_steps)}
        save_file({name: tensor.detach().clone() for name, tensor in state.items()}, folder / "state.safetensors")

    async def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        state, held = load_file(folder / "state.safetensors"), self.adapters[adapter]
        if state["a"].shape != held.factors["a"].shape:
            raise ValueError(f"the checkpoint has rank {len(state['a'])}, the adapter {len(held.factors['a'])}")
        for name, factor in held.factors.items():
            factor.data.copy_(state[name])
            factor.grad = state[f"{name}.g"].clone() if with_optimizer else None
        if with_optimizer:
            held.moments = {name: state[name].clone() for name in held.moments}
            held.num_steps = int(state["step"])

    async def export(self, adapter: str, folder: Path) -> None:
        held = self.adapters[adapter]
        factors = {name: factor.detach().clone() for name, factor in held.factors.items()}
        save_file({**factors, "scale": torch.tensor(held.scale)}, folder / "adapter_model.safetensors")

    async def drop(self, adapter: str) -> None:
        self.adapters.pop(adapter, None)


def _loss(call: LossCall, inputs: Mapping[str, np.ndarray], logprobs: torch.Tensor) -> torch.Tensor:
    if call.loss == "cross_entropy":
        return -(logprobs * torch.from_numpy(np.array(inputs["weights"]))).sum()
    advantages = torch.from_numpy(np.array(inputs["advantages"]))
    ratio = (logprobs - torch.from_numpy(np.array(inputs["logprobs"]))).exp()
    if call.loss == "ppo":
        clipped = ratio.clamp(call.options["clip_low_threshold"], call.options["clip_high_threshold"])
        return -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return -(ratio * advantages).sum()


@dataclass
class TinyEngines:
    """Implements `AdapterEngines`. `failures` are raised by the next calls of `sample`."""

    max_served: int = 2
    base: TinyBase = field(default_factory=TinyBase)
    served: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    delay_s: float = 0.0

    async def serve(self, adapter: str, folder: Path) -> None:
        if len(self.served) == self.max_served:
            raise ValueError(f"{adapter} is one more than {self.max_served}")
        if adapter in self.served:
            raise ValueError(f"{adapter} exists")
        self.served[adapter] = load_file(folder / "adapter_model.safetensors")

    async def withdraw(self, adapter: str) -> None:
        await asyncio.sleep(self.delay_s)
        del self.served[adapter]

    async def sample(self, call: SampleCall) -> SampleResult:
        await asyncio.sleep(self.delay_s)
        if self.failures:
            raise self.failures.pop(0)
        weights = None if call.adapter is None else self.served[call.adapter]
        prompt = torch.from_numpy(call.prompt.expanded_ids.astype(np.int64))
        generator = torch.Generator().manual_seed(call.settings.seed)
        samples = [self._sample(call, prompt, weights, generator) for _ in range(call.settings.num_samples)]
        scores = self._logits(prompt, weights).log_softmax(-1)
        own = torch.cat([torch.tensor([torch.nan]), scores[:-1].gather(1, prompt[1:, None])[:, 0]])
        top = scores[:-1].topk(max(call.num_top_prompt_tokens, 1))
        best = [[], *(list(zip(i.tolist(), v.tolist(), strict=True)) for v, i in zip(*top, strict=True))]
        return SampleResult(
            samples, own.numpy() if call.has_prompt_logprobs else None, best if call.num_top_prompt_tokens else None
        )

    def _sample(
        self,
        call: SampleCall,
        prompt: torch.Tensor,
        weights: Mapping[str, torch.Tensor] | None,
        generator: torch.Generator,
    ) -> ScoredTokens:
        ids, logprobs, ends = prompt, [], {END, *call.stop_token_ids}
        for _ in range(call.settings.max_tokens):
            logits = self._logits(ids, weights)[-1]
            scores = (logits / (call.settings.temperature or 1e-6)).log_softmax(-1)
            token = int(torch.multinomial(scores.exp(), 1, generator=generator))
            ids = torch.cat([ids, torch.tensor([token])])
            logprobs.append(float(scores[token]))
            if token in ends:
                break
        is_stopped = int(ids[-1]) in ends
        new = ids[len(prompt) :].numpy().astype(np.int32)
        return ScoredTokens(new, np.array(logprobs, dtype=np.float32), "stop" if is_stopped else "length")

    def _logits(self, ids: torch.Tensor, weights: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
        return self.base.logits(ids, weights, 0.0 if weights is None else float(weights["scale"]))
