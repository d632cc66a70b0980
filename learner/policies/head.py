"""Log-probs and entropies of tokens from hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from mobula.learner.policies.base import on_device

BAN_BIAS = -100.0  # engines add it to the logit of a banned token, before the temperature
NEVER = -1e30  # logit of an excluded token; finite, so that its entropy term and gradient are 0, not NaN


@dataclass(frozen=True)
class Distribution:
    """softmax((logits + bias) / temperature), with the bias `BAN_BIAS` on banned ids and 0 elsewhere.

    `first_token_temperature` above 0 (FIRE) is the temperature of a response's first token. If the engine recorded the
    set of tokens it sampled from (`Steps.kept_ids`), the softmax is over this set.
    """

    temperature: float
    banned_ids: tuple[int, ...]
    first_token_temperature: float = 0.0


PLAIN = Distribution(temperature=1.0, banned_ids=())


class Steps(NamedTuple):
    """Parameters of each of N targets' distributions, in addition to logits."""

    is_first: Tensor  # bool [N]: first target of a row
    kept_ids: Tensor  # int64 [M]: kept_ends[n - 1] to kept_ends[n] are the set of target n; empty: all tokens
    kept_rows: Tensor  # int64 [M]: the target of each
    kept_ends: np.ndarray  # int64 [N], on the host: slices of tensors do not wait for the device then

    def part(self, chunk: slice) -> Steps:
        """The parameters of adjacent targets."""
        ends = self.kept_ends[chunk]
        begin = int(self.kept_ends[chunk.start - 1]) if chunk.start > 0 else 0
        end = int(ends[-1]) if len(ends) else begin
        kept_rows = self.kept_rows[begin:end] - chunk.start
        return Steps(self.is_first[chunk], self.kept_ids[begin:end], kept_rows, ends - begin)

    def chosen(self, targets: np.ndarray) -> Steps:
        """The parameters of some targets, by their indices."""
        device, counts = self.is_first.device, np.diff(self.kept_ends, prepend=0)[targets]
        ends = counts.cumsum()
        kept = np.repeat(self.kept_ends[targets] - ends, counts) + np.arange(counts.sum())
        kept_rows = on_device(np.repeat(np.arange(len(targets)), counts), device)
        is_first, kept_ids = self.is_first[on_device(targets, device)], self.kept_ids[on_device(kept, device)]
        return Steps(is_first, kept_ids, kept_rows, ends)


class TokenLogprobs(NamedTuple):
    """Statistics of each target, with the shape [...] of the targets."""

    logprobs: Tensor  # float32 [...]
    entropy: Tensor  # float32 [...], detached unless a gradient was asked for
    is_argmax: Tensor  # bool [...]: greedy decoding picks this target


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    distribution: Distribution,
    steps: Steps | None = None,
    *,
    entropy_has_gradient: bool = False,
) -> TokenLogprobs:
    """Log-probs of `targets` [...] under `logits` [..., V], in float32 whatever the logits' type; with `steps` [N].

    The same numbers as vLLM's `processed_logprobs` with this temperature and a `logit_bias` of -100 on banned ids.
    """
    all_logprobs = _all_logprobs(logits, distribution, steps)
    with torch.set_grad_enabled(entropy_has_gradient and torch.is_grad_enabled()):
        entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    with torch.no_grad():
        is_argmax = all_logprobs.argmax(dim=-1) == targets
    return TokenLogprobs(_of_targets(all_logprobs, targets), entropy, is_argmax)


def target_logprobs(logits: Tensor, targets: Tensor, distribution: Distribution, steps: Steps | None = None) -> Tensor:
    """`token_logprobs(...).logprobs` alone."""
    return _of_targets(_all_logprobs(logits, distribution, steps), targets)


def _all_logprobs(logits: Tensor, distribution: Distribution, steps: Steps | None) -> Tensor:
    """float32 [..., V]"""
    # bfloat16 keeps 8 bits: the ratio of two rounded log-probs would be noise.
    logits = logits.float()
    if distribution.banned_ids:
        bias = logits.new_zeros(logits.shape[-1])
        for banned in distribution.banned_ids:  # assignment by index would copy the value to the device and wait
            bias[banned].fill_(BAN_BIAS)
        logits = logits + bias
    first = distribution.first_token_temperature
    if steps is not None and first > 0:
        logits = logits / torch.where(steps.is_first, first, distribution.temperature).unsqueeze(-1)
    elif distribution.temperature != 1.0:
        logits = logits / distribution.temperature
    if steps is not None and len(steps.kept_ids):
        has_set = torch.zeros_like(steps.is_first).index_fill(0, steps.kept_rows, True)
        is_cut = has_set[:, None].repeat(1, logits.shape[-1])  # bool [N, V]: tokens outside of the engine's set
        is_cut[steps.kept_rows, steps.kept_ids] = False
        logits = logits.masked_fill(is_cut, NEVER)
    return logits.log_softmax(dim=-1)


def _of_targets(all_logprobs: Tensor, targets: Tensor) -> Tensor:
    return all_logprobs.gather(-1, targets[..., None])[..., 0]


class ScoringHead(nn.Module):
    """Replaces a model's output layer, with the same weight under the same name.

    Logits are computed for one chunk of tokens at a time. A forward pass with gradients keeps those of the last
    chunk, and the backward pass computes the others again, so that no [N, V] matrix of N tokens and a vocabulary of V
    is materialised.
    """

    def __init__(self, output: nn.Module, chunk_tokens: int) -> None:
        """`output` is the model's output layer, `chunk_tokens` is `learner.logprob_chunk_tokens`."""
        super().__init__()
        if not isinstance(output, nn.Linear) or output.bias is not None:
            raise ValueError(
                f"policy.model has the output layer {output}, and logits are computed here by a linear layer without "
                "a bias alone: choose a checkpoint of a supported type"
            )
        self.weight: nn.Parameter = output.weight  # float [V, H]; of tied embeddings the same parameter
        self._chunk_tokens: int = chunk_tokens

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        distribution: Distribution,
        entropy_has_gradient: bool,
        steps: Steps | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the fields of `TokenLogprobs`: log-probs [N], entropy [N] and is_argmax [N] of each target.

        Args:
            hidden: float [N, H], the decoder's last states.
            targets: int64 [N].
            steps: parameters of each target's distribution, if they differ.
        """
        device = hidden.device.type
        is_cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_cast else self.weight.dtype
        is_trained = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
        score = _Score(distribution, steps, entropy_has_gradient, self._chunk_tokens, dtype, is_trained)
        return _ChunkedLogprobs.apply(hidden, self.weight, targets, score)


@dataclass(frozen=True)
class _Score:
    """Statistics of a chunk's logits, and the compute type."""

    distribution: Distribution
    steps: Steps | None
    entropy_has_gradient: bool
    chunk_tokens: int
    dtype: torch.dtype
    is_trained: bool  # a backward pass follows

    def __call__(self, logits: Tensor, targets: Tensor, chunk: slice) -> TokenLogprobs:
        """Statistics of the targets of `chunk`; `logits` are for this chunk."""
        steps, has_gradient = self._part(chunk), self.entropy_has_gradient
        return token_logprobs(logits, targets[chunk], self.distribution, steps, entropy_has_gradient=has_gradient)

    def with_gradient(self, statistics: TokenLogprobs) -> list[Tensor]:
        """The statistics that have a gradient: log-probs, and entropies if requested."""
        return [statistics.logprobs, statistics.entropy][: 1 + self.entropy_has_gradient]

    def trained(self, logits: Tensor, targets: Tensor, chunk: slice) -> list[Tensor]:
        """Computes these for `chunk`, and no other statistics unless entropies are requested."""
        if self.entropy_has_gradient:
            return self.with_gradient(self(logits, targets, chunk))
        return [target_logprobs(logits, targets[chunk], self.distribution, self._part(chunk))]

    def _part(self, chunk: slice) -> Steps | None:
        return None if self.steps is None else self.steps.part(chunk)

    def chunks(self, num_tokens: int) -> list[slice]:
        """At least one chunk, which may be empty."""
        return [slice(start, start + self.chunk_tokens) for start in range(0, max(num_tokens, 1), self.chunk_tokens)]


class _ChunkedLogprobs(torch.autograd.Function):
    """(hidden [N, H], weight [V, H], targets [N], score) -> log-probs, entropy, is_argmax, each [N].

    Autograd computes the gradient of a chunk's logits. The products with hidden states and weight are accumulated in
    place, so that no chunk allocates a [V, H] gradient of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, score: _Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        *others, last = score.chunks(hidden.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            used = weight.to(score.dtype)
            parts = [score(_logits(hidden[chunk].to(score.dtype), used), targets, chunk) for chunk in others]
            logits = _logits(hidden[last].to(score.dtype), used).requires_grad_(score.is_trained)
            with torch.set_grad_enabled(score.is_trained):
                kept = score(logits, targets, last)
        parts.append(TokenLogprobs(*(column.detach() for column in kept)))
        # The backward pass begins with the last chunk: kept logits take no more memory than computed ones.
        ctx.last = (logits, score.with_gradient(kept)) if score.is_trained else None
        logprobs, entropy, is_argmax = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets)
        ctx.score = score
        ctx.mark_non_differentiable(*([is_argmax] if score.entropy_has_gradient else [entropy, is_argmax]))
        return logprobs, entropy, is_argmax

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprobs_grad: Tensor, entropy_grad: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        score, (needs_hidden, needs_weight, *_) = ctx.score, ctx.needs_input_grad
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            used = weight.to(score.dtype)
            for chunk in reversed(score.chunks(hidden.shape[0])):
                states = hidden[chunk].to(score.dtype)
                if ctx.last is not None:
                    (logits, outputs), ctx.last = ctx.last, None
                else:
                    logits = _logits(states, used).requires_grad_()
                    with torch.enable_grad():
                        outputs = score.trained(logits, targets, chunk)
                grads = [logprobs_grad[chunk], entropy_grad[chunk]][: len(outputs)]
                [logits_grad] = torch.autograd.grad(outputs, logits, grads)  # [n, V]
                logits_grad = logits_grad.to(score.dtype)
                if hidden_grad is not None:
                    hidden_grad[chunk] = (logits_grad @ used).to(hidden.dtype)
                if weight_grad is not None:
                    if logits_grad.dtype == weight_grad.dtype:
                        weight_grad.addmm_(logits_grad.T, states)
                    else:  # the sum stays float32
                        weight_grad += logits_grad.T @ states
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None


def _logits(states: Tensor, weight: Tensor) -> Tensor:
    """[n, V] of factors in the run's dtype: on a GPU float32, as engines have them (`head_dtype` in
    actors/samplers/vllm/arguments.py).

    Rounded to bfloat16, logits of 40 have steps of 0.25, which is half of what two kernels differ by. On CPU float32
    takes five times as long, and both sides round.
    """
    if weight.dtype is not torch.float32 and weight.is_cuda:
        return torch.mm(states, weight.T, out_dtype=torch.float32)
    return linear(states, weight)
