"""The section `guard`: which signs are on, and contradictions with the rest of a run."""

from __future__ import annotations

import pytest

from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.rules.run import guard_signs

DIGITS = ("experiment=digits", "resources=laptop")


def test_without_a_judge_and_limits_nothing_is_on() -> None:
    assert guard_signs(load_config([*DIGITS])) == []


def test_a_limit_switches_its_sign_on_and_none_an_action_off() -> None:
    config = load_config([*DIGITS, "guard.limits.length=2", "guard.limits.language=0.1", "guard.actions.language=none"])
    assert guard_signs(config) == ["length"]
    assert config.guard.action_of("length") == "warn"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["guard.limits.length=0.5"], "guard.limits.length=0.5 is a ratio"),
        (["rewards=exact_match", "guard.limits.format=0.2"], "no component has the function format"),
        (
            ["guard.limits.length=2", "guard.action=raise_kl", "algorithm.kl.coef=0"],
            "guard raises the KL coefficient for length, but algorithm.kl.coef=0",
        ),
        (
            ["guard.limits.length=2", "guard.actions.length=rollback", "checkpoints.interval_steps=0"],
            "guard rolls back for length, but checkpoints.interval_steps=0",
        ),
    ],
)
def test_a_guard_that_cannot_act_is_refused_with_the_next_action(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*DIGITS, *words])
    assert message in str(caught.value)
