"""Log-probabilities under the distribution that engines sample from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BAN_BIAS = -100.0  # what engines add to the logit of a banned token, before the temperature


@dataclass(frozen=True)
class Distribution:
    """softmax((logits + bias) / temperature), with the bias `BAN_BIAS` on banned ids and 0 elsewhere."""

    temperature: float
    banned_ids: tuple[int, ...]


PLAIN = Distribution(temperature=1.0, banned_ids=())


class TokenLogprobs(NamedTuple):
    """What is known about each target; leading shape [...] is that of the targets."""

    logprobs: Tensor  # float32 [...]
    entropy: Tensor  # float32 [...], detached unless a gradient was asked for
    is_argmax: Tensor  # bool [...]: greedy decoding picks this target


def token_logprobs(
    logits: Tensor, targets: Tensor, distribution: Distribution, *, entropy_has_gradient: bool = False
) -> TokenLogprobs:
    """Log-probs of `targets` [...] under `logits` [..., V], in float32 whatever the logits' type.

    The same numbers as vLLM's `processed_logprobs` with this temperature and a `logit_bias` of -100 on banned ids.
    """
    all_logprobs = _all_logprobs(logits, distribution)
    with torch.set_grad_enabled(entropy_has_gradient and torch.is_grad_enabled()):
        entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
    with torch.no_grad():
        is_argmax = all_logprobs.argmax(dim=-1) == targets
    return TokenLogprobs(_of_targets(all_logprobs, targets), entropy, is_argmax)


def target_logprobs(logits: Tensor, targets: Tensor, distribution: Distribution) -> Tensor:
    """`token_logprobs(...).logprobs` alone."""
    return _of_targets(_all_logprobs(logits, distribution), targets)


def _all_logprobs(logits: Tensor, distribution: Distribution) -> Tensor:
    """float32 [..., V]"""
    logits = logits.float()
    if distribution.banned_ids:
        bias = logits.new_zeros(logits.shape[-1])
        bias[list(distribution.banned_ids)] = BAN_BIAS
        logits = logits + bias
    if distribution.temperature != 1.0:
        logits = logits / distribution.temperature
    return logits.log_softmax(dim=-1)


def _of_targets(all_logprobs: Tensor, targets: Tensor) -> Tensor:
    return all_logprobs.gather(-1, targets[..., None])[..., 0]
