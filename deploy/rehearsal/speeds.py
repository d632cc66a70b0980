"""Speeds: how fast each role of a rehearsal works, stated in words or in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from mobula.cluster.errors import PreflightError

HOW = "write KEY=NUMBER, or a YAML file of such entries"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Times of one worker of each role. Every number is in seconds, tokens or bytes per second.

    An engine step takes `decode_step_s + decode_sequence_s * responses` and gives each response of the batch a token.
    """

    decode_step_s: float
    decode_sequence_s: float
    prefill_tokens_per_s: float  # of one engine
    learner_tokens_per_s: float  # of one rank: rows with their prompts, forward and backward
    engine_response_s: float = 0.0  # of one engine, more for each response
    wait_s: float = 0.0  # of each group between engine and driver
    learner_response_s: float = 0.0  # of one rank, more for each sampled token: its logits
    update_s: float = 0.0  # of one step, apart from its tokens
    exchange_s: float = 0.0  # more for each step where there are two or more ranks: their collectives
    reference_tokens_per_s: float = math.inf  # of one scorer
    reference_response_s: float = 0.0  # more for each sampled token
    reference_s: float = 0.0  # of one call
    reward_s: float = 0.0  # of one group, at one worker of a service
    push_s: float = 0.0  # of one push, apart from its bytes
    push_bytes_per_s: float = math.inf  # of one transfer group
    settle_s: float = 0.0  # engines load a push so much longer than the learner sends it
    start_s: float = 60.0  # of a process that loads the model
    storage_bytes_per_s: float = 2e9  # of one learner rank, to and from checkpoints
    step_s: float = 0.0  # of the driver between the phases of a step

    def with_words(self, words: Sequence[str]) -> Speeds:
        """Returns these speeds with some of them stated, as `decode_step_s=0.02`."""
        return replace(self, **_stated(dict(word.partition("=")[::2] for word in words), "--speed"))

    def with_file(self, path: Path) -> Speeds:
        """Returns these speeds with those of a YAML file."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise PreflightError(f"--speeds {path} cannot be read ({error}): {HOW}") from error
        if not isinstance(values, Mapping):
            raise PreflightError(f"--speeds {path} holds no entries: {HOW}")
        return replace(self, **_stated(values, f"--speeds {path}"))


def _stated(values: Mapping[str, Any], where: str) -> dict[str, float]:
    known = [f.name for f in fields(Speeds)]
    stated = {}
    for key, value in values.items():
        if key not in known:
            raise PreflightError(f"{where}: {key} is unknown: choose {', '.join(known)}")
        try:
            stated[key] = float(value)
        except (TypeError, ValueError) as error:
            raise PreflightError(f"{where}: {key}={value} is no number: {HOW}") from error
        if not stated[key] >= 0 or (key.endswith("_per_s") and stated[key] == 0):
            raise PreflightError(f"{where}: {key}={value} is out of range: give a positive number")
    return stated
