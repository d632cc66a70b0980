"""With its adapters off the model is the initial policy that a scorer would serve."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from learner_data import random_groups, tiny_config
from offline_rows import config_of, rows
from transformers import AutoTokenizer

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.runtime.placement import needed_roles
from mobula.configs.errors import ConfigError
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner
from mobula.learner.offline import OfflineLearner

LORA = ("policy.lora.rank=4", "policy.lora.alpha=16.0", "algorithm.max_staleness=4", "warm_start=none")
OFF = "reference.place=learner_ranks"
PLACES = {
    "loss": ("algorithm.kl.coef=0.5",),
    "reward": ("algorithm.kl.coef=0.5", "algorithm.kl.place=reward", "algorithm.kl.estimator=k1"),
}


def connected(config: RunConfig) -> Learner:
    learner = Learner(config, 0, 1, (250,))
    learner.connect("")
    return learner


@pytest.mark.parametrize("words", PLACES.values(), ids=PLACES)
def test_updates_are_those_of_a_scorer_of_the_initial_policy(folder: Path, words: tuple[str, ...]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scorer = ReferenceScorer(tiny_config(folder, *LORA, *words), (250,))
    scorer.load(folder)
    apart = "learner.share_prompts=false"  # micro-batches of another size share another part of the prompts
    asking = connected(tiny_config(folder, *LORA, *words, apart, "resources.reference.num_workers=1"))
    alone = connected(tiny_config(folder, *LORA, *words, apart, OFF, "learner.tokens_per_microbatch=100"))
    for version in (1, 2, 3):
        groups = random_groups(tokenizer, 4, 3, seed=version)
        scored = [
            dataclasses.replace(g, reference_logprobs=s) for g, s in zip(groups, scorer.score(groups), strict=True)
        ]
        expected = asking.update(scored, version).metrics
        assert alone.update(groups, version).metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert expected["kl"] > 1e-5, "the adapters have moved, and are back on when the step is trained"


def test_no_scorer_is_started(folder: Path) -> None:
    words = (*LORA, *PLACES["loss"], "resources.reference.num_workers=1")
    assert "reference" in needed_roles(tiny_config(folder, *words))
    assert "reference" not in needed_roles(tiny_config(folder, *words, OFF))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("policy.lora.rank=0",), "policy.lora.rank above 0"),
        (("warm_start=supervised",), "warm_start=none"),
        (("algorithm.kl.coef=0",), "algorithm.kl.coef above 0"),
    ],
)
def test_a_learner_that_is_no_reference_is_refused(folder: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"reference.place=learner_ranks needs {message}.*reference.place=scorers"):
        tiny_config(folder, *overridden((*LORA, *PLACES["loss"], OFF), words))


PAIRED = ("policy.lora.rank=4", "policy.lora.alpha=16.0")


def dpo_learner(folder: Path, *words: str) -> OfflineLearner:
    learner = OfflineLearner(config_of(folder, "dpo", *PAIRED, *words), 0, 1, ())
    learner.connect("")
    return learner


@pytest.mark.parametrize("packing", [False, True])
def test_updates_of_pairs_are_those_of_a_scorer(folder: Path, packing: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scorer = ReferenceScorer(config_of(folder, "dpo", *PAIRED), ())
    scorer.load(folder)
    asking = dpo_learner(folder)
    alone = dpo_learner(folder, OFF, "resources.reference.num_workers=0", "learner.tokens_per_microbatch=200",
                      f"learner.packing={packing}".lower())  # fmt: skip
    for version in (1, 2, 3):
        bare = [dataclasses.replace(row, reference_logprobs=None) for row in rows(tokenizer, "dpo", seed=version)]
        scored = [dataclasses.replace(g, reference_logprobs=s) for g, s in zip(bare, scorer.score(bare), strict=True)]
        expected = asking.update(scored, version).metrics
        assert alone.update(bare, version).metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert dict(alone.assess(bare)) == pytest.approx(dict(asking.assess(scored)), rel=1e-3, abs=1e-5)
    assert abs(expected["margin"]) > 1e-4, "the adapters have moved, and are back on when the step is trained"


def test_no_scorer_of_pairs_is_started(folder: Path) -> None:
    assert "reference" in needed_roles(config_of(folder, "dpo", *PAIRED))
    assert "reference" not in needed_roles(config_of(folder, "dpo", *PAIRED, OFF, "resources.reference.num_workers=0"))


def test_full_training_has_no_reference_of_its_own(folder: Path) -> None:
    with pytest.raises(ConfigError, match="reference.place=learner_ranks needs policy.lora.rank above 0"):
        config_of(folder, "dpo", OFF)


def test_a_job_that_compares_with_nothing_needs_no_reference(folder: Path) -> None:
    with pytest.raises(ConfigError, match="offline.job=dpo, since nothing reads a reference"):
        config_of(folder, "sft", *PAIRED, OFF)
