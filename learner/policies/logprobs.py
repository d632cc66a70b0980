"""Log-probabilities under the engines' sampling distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mobula.learner.policies.device_copies import on_device

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
        logits = logits.masked_fill(_is_cut(steps, logits.shape[-1]), NEVER)
    return logits.log_softmax(dim=-1)


def _is_cut(steps: Steps, num_ids: int) -> Tensor:
    """bool [N, V]: tokens outside of the engine's set."""
    has_set = torch.zeros_like(steps.is_first).index_fill(0, steps.kept_rows, True)
    is_cut = has_set[:, None].repeat(1, num_ids)
    is_cut[steps.kept_rows, steps.kept_ids] = False
    return is_cut


def _of_targets(all_logprobs: Tensor, targets: Tensor) -> Tensor:
    return all_logprobs.gather(-1, targets[..., None])[..., 0]
