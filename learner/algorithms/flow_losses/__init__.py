"""Losses that only flow models have, one formula a file; `algorithm.loss` chooses."""

from __future__ import annotations

from learner.algorithms.flow_losses.grpo_guard import grpo_guard
from learner.algorithms.flow_losses.nft import nft

__all__ = ["grpo_guard", "nft"]
