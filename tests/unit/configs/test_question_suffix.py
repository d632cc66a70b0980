"""The text behind each question asks for a box where the reward reads one, and for nothing elsewhere."""

from __future__ import annotations

import pytest

from mobula.configs.load import load_config

OWN = ["experiment=own", "policy.model=m", "data.path=d"]
BOXED = r" Answer in \boxed{}."


@pytest.mark.parametrize(
    ("words", "suffix"),
    [
        ([], BOXED),
        (["data=parquet"], BOXED),
        (["data=webdataset"], BOXED),
        (["data=huggingface"], BOXED),
        (["data=messages"], ""),
        (["rewards=exact_match"], ""),
        (["rewards=exact_match", "rewards.components.0.options.extract=boxed"], BOXED),
        (["rewards=maye"], BOXED),
        (["rewards.components.0.options.require_boxed=false"], ""),
        (["rewards.components.0.weight=0", "rewards.components.1.weight=1"], BOXED),
        (["rewards.components.0.options.require_boxed=false", "rewards.components.1.weight=1"], BOXED),
        (["rewards=exact_match", "data.prompt_suffix=' Be brief.'"], " Be brief."),
        (["data.prompt_suffix=''"], ""),
    ],
)
def test_the_reward_decides_what_is_put_behind_a_question(words: list[str], suffix: str) -> None:
    assert load_config([*OWN, *words]).question_suffix == suffix


def test_a_reward_of_ones_own_changes_no_question() -> None:
    mine = "{name: mine, function: f.py:f, weight: 1.0, options: {}, service: reward, needs_images: false, "
    mine += "retries: 0, cache_entries: 0}"
    config = load_config([*OWN, f"rewards.components=[{mine}]", "rewards.accuracy_component=mine"])
    assert (config.data.prompt_suffix, config.question_suffix) == ("auto", "")


def test_questions_that_name_their_own_form_get_no_suffix() -> None:
    assert load_config(["experiment=digits"]).question_suffix == ""
    assert load_config(["experiment=sft", "policy.model=m", "data.path=d"]).question_suffix == ""
