"""The identity of an evaluation: what changes its numbers changes it, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.configs.load import load_config
from mobula.deploy.wiring.evaluation import identity_of

PROMPT = Prompt("test/0/a", "a", "user: 1+1? Answer in a box.", np.arange(3), np.arange(3), references=("2",))
SETTINGS = SamplingSettings(num_samples=1, temperature=0.0, max_tokens=8, seed=0)
WORDS = ["experiment=own", "policy.model=m", "data.path=d"]


def identity(words: list[str] | None = None, prompt: Prompt = PROMPT, split: str = "test", **settings: object) -> dict:
    return identity_of(load_config([*WORDS, *(words or [])]), split, [prompt], replace(SETTINGS, **settings))


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        (identity(split="validation"), {"split"}),
        (identity(num_samples=4), {"num_samples"}),
        (identity(temperature=1.0), {"temperature"}),
        (identity(top_p=0.9), {"top_p"}),
        (identity(max_tokens=9), {"max_tokens"}),
        (identity(stop_strings=(".",)), {"stop_strings"}),
        (identity(prompt=replace(PROMPT, text="user: 1+1?")), {"prompts"}),  # template, suffix, system prompt
        (identity(prompt=replace(PROMPT, references=("3",))), {"rows"}),
        (identity(prompt=replace(PROMPT, metadata={"label": "sums"})), {"rows"}),
        (identity(["rewards=exact_match"]), {"rewards"}),
        (identity(["evaluation.correct_from=0.5"]), {"correct_from"}),
    ],
)
def test_what_changes_the_numbers_changes_the_identity(changed: dict, keys: set[str]) -> None:
    own = identity()
    assert {key for key in own | changed if own.get(key) != changed.get(key)} == keys


def test_seeds_ids_weights_of_components_and_speed_change_nothing() -> None:
    own = identity()
    assert identity(seed=7) == identity(priority=3) == own
    assert identity(prompt=replace(PROMPT, prompt_id="x", sample_id="b")) == own
    assert identity(["sampler=huggingface", "num_steps=7", "rewards.components.0.weight=0.5"]) == own
    assert json.loads(json.dumps(own)) == own, "it survives a checkpoint"
