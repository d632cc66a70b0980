"""The last line of a run names what was measured, in the unit of its range."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mobula.cluster.metrics.summary import Summary
from mobula.configs.load import load_config
from mobula.deploy.run.headline import headline

OWN = ["experiment=own", "policy.model=m", "data.path=d"]
MINE = (
    "rewards.components=[{name: mine, function: f.py:f, weight: 1.0, options: {}, service: reward, "
    "needs_images: false, retries: 0, cache_entries: 0}]"
)


def summary(before: float | None, after: float | None, tokens: tuple[float, float] | None = None) -> Summary:
    values = {field.name: None for field in fields(Summary)}
    shares = [{} if tokens is None else {"token_accuracy": share} for share in tokens or (0.0, 0.0)]
    known = {"accuracy_before": before, "accuracy_after": after, "values_before": shares[0], "values_after": shares[1]}
    return Summary(**{**values, **known})


@pytest.mark.parametrize(
    ("words", "measured", "line"),
    [
        (OWN, summary(0.15, 0.833), "held-out accuracy 15.0% before RL, 83.3% after RL"),
        (OWN, summary(None, None), "held-out accuracy not measured before RL, not measured after RL"),
        (
            [*OWN, MINE, "rewards.accuracy_component=mine"],
            summary(-0.97, 0.5),
            "held-out mean of mine -0.97 before RL, 0.5 after RL",
        ),
        (
            [*OWN, MINE, "rewards.accuracy_component=mine"],
            summary(0.2, 7.25),
            "held-out mean of mine 0.2 before RL, 7.25 after RL",
        ),
        (
            ["experiment=sft", "policy.model=m", "data.path=d"],
            summary(0.0, 0.0, (0.47, 0.78)),
            "held-out whole answers correct 0.0% before training, 0.0% after training; tokens correct 47.0% before "
            "training, 78.0% after training",
        ),
    ],
)
def test_the_headline_names_what_was_measured(words: list[str], measured: Summary, line: str) -> None:
    assert headline(load_config(words), measured) == line
