"""DiffusionNFT: good images pull the velocity towards them, bad ones push it away, without any likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.policy_losses.base import PolicyLoss

ERROR_FLOOR = 1e-5  # of the mean absolute error that squared errors are divided by


def nft(
    predicted: Tensor,
    old: Tensor,
    noised: Tensor,
    clean: Tensor,
    sigmas: Tensor,
    advantages: Tensor,
    *,
    beta: float,
    max_advantage: float,
) -> PolicyLoss:
    """A_max (rho E(v+) + (1 - rho) E(v-)) / beta, a mean over K levels; [B, 1].

        v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v
        rho = clip(A / (2 A_max) + 1/2, 0, 1)
        E(w) = mean (x - sigma w - clean)^2 / sg(mean |x - sigma w - clean|)

    All of the image counts in the means of E. `predicted`, `old`, `noised` and `clean` are [B, K, ...], `sigmas` [B,
    K, 1, ...], `advantages` [B, 1]. The ratio that is reported is 1: there is none.

    Source: DiffusionNFT, arXiv:2509.16117.
    """
    share = (advantages / (2 * max_advantage) + 0.5).clamp(0, 1)
    positive = beta * predicted + (1 - beta) * old
    negative = (1 + beta) * old - beta * predicted
    good, bad = (_error(noised - sigmas * velocity - clean) for velocity in (positive, negative))  # [B, K]
    loss = max_advantage / beta * (share * good + (1 - share) * bad).mean(dim=1, keepdim=True)
    is_out = advantages.abs() > max_advantage
    return PolicyLoss(loss, torch.ones_like(loss), is_out)


def _error(difference: Tensor) -> Tensor:
    """[B, K, ...] -> [B, K]"""
    flat = difference.flatten(2)
    return flat.square().mean(-1) / flat.detach().abs().mean(-1).clamp(min=ERROR_FLOOR)
