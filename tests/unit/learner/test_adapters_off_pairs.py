"""DPO of adapters: the model without them is the initial policy that a scorer would serve."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from offline_rows import config_of, rows
from transformers import AutoTokenizer

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.runtime.placement import needed_roles
from mobula.configs.errors import ConfigError
from mobula.learner.offline.learner import OfflineLearner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

LORA = ("policy.lora.rank=4", "policy.lora.alpha=16.0")
OFF = "reference.place=learner_ranks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)


def connected(folder: Path, *words: str) -> OfflineLearner:
    learner = OfflineLearner(config_of(folder, "dpo", *LORA, *words), 0, 1, ())
    learner.connect("")
    return learner


@pytest.mark.parametrize("packing", [False, True])
def test_updates_are_those_of_a_scorer_of_the_initial_policy(folder: Path, packing: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scorer = ReferenceScorer(config_of(folder, "dpo", *LORA), ())
    scorer.load(folder)
    asking = connected(folder)
    alone = connected(folder, OFF, "resources.reference.num_workers=0", "learner.tokens_per_microbatch=200",
                      f"learner.packing={packing}".lower())  # fmt: skip
    for version in (1, 2, 3):
        bare = [dataclasses.replace(row, reference_logprobs=None) for row in rows(tokenizer, "dpo", seed=version)]
        scored = [dataclasses.replace(g, reference_logprobs=s) for g, s in zip(bare, scorer.score(bare), strict=True)]
        expected = asking.update(scored, version).metrics
        assert alone.update(bare, version).metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert dict(alone.assess(bare)) == pytest.approx(dict(asking.assess(scored)), rel=1e-3, abs=1e-5)
    assert abs(expected["margin"]) > 1e-4, "the adapters have moved, and are back on when the step is trained"


def test_no_scorer_is_started(folder: Path) -> None:
    assert "reference" in needed_roles(config_of(folder, "dpo", *LORA))
    assert "reference" not in needed_roles(config_of(folder, "dpo", *LORA, OFF, "resources.reference.num_workers=0"))


def test_full_training_has_no_reference_of_its_own(folder: Path) -> None:
    with pytest.raises(ConfigError, match="reference.place=learner_ranks needs policy.lora.rank above 0"):
        config_of(folder, "dpo", OFF)


def test_a_job_that_compares_with_nothing_needs_no_reference(folder: Path) -> None:
    with pytest.raises(ConfigError, match="offline.job=dpo, since nothing reads a reference"):
        config_of(folder, "sft", *LORA, OFF)
