"""The tables of docs/supported.md and README.md are those of the registries; every entry can be chosen in a run."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from docs.generate import support_tables
from docs.generate.support_tables import BEGIN, END, choices, rewritten

from mobula.configs.load import load_config
from mobula.learner.algorithms.advantages import ADVANTAGES
from mobula.learner.algorithms.corrections import CORRECTIONS, OLD_LOGPROBS
from mobula.learner.algorithms.flow_losses import FLOW_LOSSES
from mobula.learner.algorithms.kl import KL_ESTIMATORS
from mobula.learner.algorithms.offline_losses import PREFERENCE_LOSSES, SCORE_LOSSES
from mobula.learner.algorithms.policy_losses import AGGREGATIONS, POLICY_LOSSES
from mobula.learner.algorithms.token_advantages import TOKEN_ADVANTAGES, TURN_ADVANTAGES
from mobula.learner.optim import OPTIMIZERS


def test_readme_and_docs_have_the_generated_tables() -> None:
    for file, block in (
        (support_tables.README, support_tables.summary()),
        (support_tables.TARGET, support_tables.text()),
    ):
        page = file.read_text(encoding="utf-8")
        assert rewritten(page, block) == page, "run `python -m docs.generate.support_tables`"


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("algorithm.advantage", (*ADVANTAGES, *TOKEN_ADVANTAGES, *TURN_ADVANTAGES)),
        ("algorithm.loss", (*POLICY_LOSSES, *FLOW_LOSSES)),
        ("algorithm.loss_aggregation", AGGREGATIONS),
        ("algorithm.kl.estimator", KL_ESTIMATORS),
        ("algorithm.old_logprobs", OLD_LOGPROBS),
        ("algorithm.correction", CORRECTIONS),
        ("learner.optimizer", OPTIMIZERS),
        ("offline.dpo.loss", PREFERENCE_LOSSES),
        ("offline.reward_model.loss", SCORE_LOSSES),
    ],
)
def test_what_a_registry_holds_is_what_its_key_takes(key: str, registry: Iterable[str]) -> None:
    assert set(choices(key)) == set(registry)


@pytest.mark.parametrize("key", ["learner.backend", "resources.transport", "weight_sync.payload", "resources.dtype"])
def test_keys_without_a_registry_have_their_values_in_the_schema(key: str) -> None:
    section, name = key.split(".")
    config = load_config(["experiment=digits"])
    assert getattr(getattr(config, section), name) in choices(key) and len(choices(key)) > 1


def test_an_edited_table_is_written_again_and_the_text_around_it_stays() -> None:
    page = f"# Head\n\n{BEGIN}\n| `made_up` |\n{END}\n\ntail\n"
    block = support_tables.text()
    again = rewritten(page, block)
    assert again.startswith("# Head\n\n") and again.endswith("\n\ntail\n")
    assert "made_up" not in again and "`qwen2_5_vl`" in again
    assert rewritten(again, block) == again


@pytest.mark.parametrize("page", ["no markers", f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_page_without_one_block_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="add them"):
        rewritten(page, "")
