"""With its adapters off the learner is the reference that a scorer of the initial checkpoint is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from learner_data import random_groups, tiny_config
from transformers import AutoTokenizer

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.runtime.placement import needed_roles
from mobula.configs.errors import ConfigError
from mobula.configs.schema import RunConfig
from mobula.configs.words import overridden
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

LORA = ("policy.lora.rank=4", "policy.lora.alpha=16.0", "algorithm.max_staleness=4", "warm_start=none")
OFF = "reference.place=learner_ranks"
PLACES = {
    "loss": ("algorithm.kl.coef=0.5",),
    "reward": ("algorithm.kl.coef=0.5", "algorithm.kl.place=reward", "algorithm.kl.estimator=k1"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)


def connected(config: RunConfig) -> Learner:
    learner = Learner(config, 0, 1, (250,))
    learner.connect("")
    return learner


@pytest.mark.parametrize("words", PLACES.values(), ids=PLACES)
def test_updates_are_those_of_a_scorer_of_the_initial_policy(folder: Path, words: tuple[str, ...]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scorer = ReferenceScorer(tiny_config(folder, *LORA, *words), (250,))
    scorer.load(folder)
    asking = connected(tiny_config(folder, *LORA, *words, "resources.reference.num_workers=1"))
    alone = connected(tiny_config(folder, *LORA, *words, OFF, "learner.tokens_per_microbatch=100"))
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
