"""Each rule that compares an answer with the references is a reward by one word, `rewards=NAME`."""

from __future__ import annotations

import pytest

from mobula.cluster.records.trajectory import Response
from mobula.configs.groups import groups
from mobula.configs.load import load_config
from mobula.rewards.contract import RewardRequest
from mobula.rewards.functions import BUILT_IN
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.scoring import RewardScoring
from mobula.rewards.tools import Tools

ANSWERS = "mobula.rewards.functions.answers."
RULES = [name for name, target in BUILT_IN.items() if target.startswith(ANSWERS) and not name.startswith("aerorl_")]
"""aeroRL's rules are the parts of one preset, `rewards=aerorl`."""


@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_answers_has_a_preset_of_its_name(name: str) -> None:
    assert name in groups()["rewards"]
    rewards = load_config([f"rewards={name}"], is_complete=False).rewards
    assert rewards.components[0].function == name and rewards.components[0].weight == 1


@pytest.mark.parametrize(
    ("name", "references", "metadata", "values"),
    [
        ("exact_match", ("Paris", "City of Paris"), {}, {"paris": 1.0, "It is Paris.": 0.0, "Rome": 0.0}),
        ("multiple_choice", ("C",), {}, {"(C) a cat": 1.0, "the answer is C": 1.0, "A or C": 0.0, "B": 0.0}),
        ("anls", ("receipt",), {}, {"receipt": 1.0, "receipts": 0.875, "bill": 0.0}),
        ("relaxed_accuracy", ("200",), {}, {"209": 1.0, "211": 0.0, "200.0": 1.0}),
        ("true_false", ("True",), {}, {"Yes, it is.": 1.0, "It is not true.": 0.0, "perhaps": 0.0}),
        ("keywords", (), {"keywords": ["red", "circle"]}, {"A red circle.": 1.0, "A red square.": 0.5}),
    ],
)
def test_a_named_reward_scores_as_its_rule_does(
    name: str, references: tuple[str, ...], metadata: dict[str, object], values: dict[str, float]
) -> None:
    rewards = load_config([f"rewards={name}"], is_complete=False).rewards
    isolated = IsolatedProcess(timeout_s=20, start_timeout_s=60)
    scoring = RewardScoring(rewards, None, Tools(isolated, "cpu", "float32"))
    requests = [RewardRequest(Response(text, 3, False), references, metadata, "?") for text in values]
    assert [reward.value for reward in scoring.rewards(requests)] == list(values.values())
    isolated.close()
