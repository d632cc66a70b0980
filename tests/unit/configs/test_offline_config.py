"""Offline jobs: their presets load, and what contradicts them is refused with the next action."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mobula.cluster.runtime.placement import needed_roles
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.overrides import FOLDER
from mobula.configs.schema import RunConfig
from mobula.deploy.cli import app

ROWS = ("algorithm.supervised.path=x", "algorithm.supervised.coef=1")
GIVEN = ("policy.model=x", "data.path=y")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dpo", "experiment=digits"], "offline.job=none with experiment=digits: use `mobula train`, or name an"),
        (["reward-model", "experiment=dpo_rlaif_v"], "experiment whose offline.job is reward_model"),
    ],
)
def test_a_command_refuses_an_experiment_of_another_job(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("command", "experiment"), [("dpo", "dpo"), ("dpo", "dpo_rlaif_v"), ("reward-model", "reward_model_rlaif_v")]
)
def test_a_command_trains_the_experiment_of_its_job_or_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, command: str, experiment: str
) -> None:
    found: list[RunConfig] = []
    monkeypatch.setattr("mobula.deploy.run.runtime.train", lambda config, preloaded: found.append(config) or 0)
    named = [] if experiment == "dpo" else [f"experiment={experiment}"]
    result = CliRunner().invoke(app, [command, *named, "policy.model=m", "data.path=d", "num_steps=3"])
    assert result.exit_code == 0, result.output
    assert [(config.name, config.num_steps) for config in found] == [(experiment, 3)]


@pytest.mark.parametrize(
    ("job", "rows", "roles"),
    [
        ("sft", "conversation", ["learner"]),
        ("reward_model", "pair", ["learner"]),
        ("dpo", "pair", ["learner", "reference"]),
    ],
)
def test_a_preset_starts_the_roles_of_its_job(job: str, rows: str, roles: list[str]) -> None:
    config = load_config([f"experiment={job}", *GIVEN])
    assert (config.offline.job, config.offline.rows, config.offline.is_on) == (job, rows, True)
    assert list(needed_roles(config)) == roles
    preset = Path(FOLDER / "experiment" / f"{job}.yaml").read_text()
    assert len(preset.splitlines()) <= 25


def test_scored_rows_are_those_of_regression() -> None:
    words = ("experiment=reward_model", "offline.reward_model.loss=regression", *GIVEN)
    assert load_config(words).offline.rows == "scored"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("experiment=sft", "data=jsonl"), "offline.job=sft trains on conversations, and data.kind=jsonl .*data=chat"),
        (("data=chat",), "data.kind=chat holds conversations.*mobula sft"),
        (("experiment=dpo", "data.prompt_suffix=' x'"), "data.prompt_suffix=' x' is put behind questions"),
        (("experiment=sft", "algorithm.kl.coef=0.1"), "algorithm.kl.coef=0.1: set algorithm.kl.coef=0"),
        (("experiment=sft", "data.curriculum.kind=easy_first"), "data.curriculum.kind=easy_first: set .*kind=none"),
        (("experiment=sft", "warm_start=supervised"), "warm_start.num_steps=200: set warm_start.num_steps=0"),
        (("experiment=sft", "replay.journal=true"), "replay.journal=true: set replay.journal=false"),
        (("experiment=dpo", "sampler.temperature=0.5"), "sampler.temperature=0.5: set sampler.temperature=1"),
        (("experiment=reward_model", "policy.lora.rank=8"), "policy.lora.rank=8 trains adapters alone"),
        (("experiment=sft", "offline.batch_size=1"), "offline.batch_size=1 leaves some"),
        (("experiment=dpo", "offline.dpo.loss=ipo", "offline.dpo.label_smoothing=0.1"), "offline.dpo.loss=sigmoid"),
        (("experiment=dpo", "resources.reference.num_workers=0"), "offline.job=dpo compares with the initial policy"),
        (("experiment=sft", *ROWS), "algorithm.supervised.coef=1 adds rows to steps of RL, and offline.job=sft"),
        (("experiment=glyphs_nft", *ROWS), "sampler.kind=flow makes images: set algorithm.supervised.coef=0"),
        (("experiment=dpo", "offline.dpo.beta=0"), "offline.dpo.beta got 0"),
        (("experiment=dpo", "offline.dpo.label_smoothing=0.5"), "less than 0.5"),
    ],
)
def test_what_contradicts_a_job_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*words, *GIVEN])
