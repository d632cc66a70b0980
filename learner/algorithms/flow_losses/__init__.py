"""Losses that only flow models have, one formula a file; `algorithm.loss` chooses."""

from __future__ import annotations

from learner.algorithms.flow_losses.grpo_guard import grpo_guard
from learner.algorithms.flow_losses.nft import nft

FLOW_LOSSES = {"nft": nft, "grpo_guard": grpo_guard}

__all__ = ["FLOW_LOSSES", "grpo_guard", "nft"]
