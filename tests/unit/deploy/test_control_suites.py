"""The suites of an evaluation with controls: names, rows, prompts, and what is kept of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mobula.cluster.metrics.step_records import HELD_OUT
from mobula.cluster.rollout.evaluation import Evaluator, NothingKept, ResultFiles
from mobula.configs.load import load_config
from mobula.deploy.wiring.evaluation import build_evaluator
from mobula.deploy.wiring.preparation import Prepared, prepare

ALL = "[direct_prompt,blank_image,swapped_image,no_image]"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("controls")
    words = [f"data.path={folder / 'digits'}", f"policy.model={folder / 'model'}", f"folder={folder / 'runs'}"]
    suite = (
        "evaluation.suites={hard: {split: validation, num_prompts: 4, num_samples: 2, temperature: 1.0, top_p: 1.0}}"
    )
    config = load_config(["experiment=digits", *words, "evaluation.num_prompts=9", suite])
    found = prepare(config, lambda media: media)
    assert isinstance(found, Prepared)
    return found


def evaluator(prepared: Prepared, *words: str) -> Evaluator:
    config = prepared.config
    evaluation = load_config(["experiment=digits", *words]).evaluation
    changed = {"controls": evaluation.controls, "max_control_prompts": evaluation.max_control_prompts}
    changed |= {"direct_prompt": evaluation.direct_prompt}
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update=changed)})
    roles = SimpleNamespace()
    return build_evaluator(replace(prepared, config=config), roles, roles, lambda result: None, roles)


def test_each_suite_has_each_control_with_the_same_rows(prepared: Prepared) -> None:
    suites = {suite.name: suite for suite in evaluator(prepared, f"evaluation.controls={ALL}").suites}
    assert len(suites) == 2 * 5
    for of in (HELD_OUT, "hard"):
        ids = [prompt.prompt_id.removeprefix(f"{of}:") for prompt in suites[of].prompts]
        for control in ALL.strip("[]").split(","):
            found = suites[f"{of}.{control}"]
            assert [p.prompt_id.removeprefix(f"{of}.{control}:") for p in found.prompts] == ids
            assert (found.of, found.control, found.settings) == (of, control, suites[of].settings)
            assert found.identity["control"] == control and found.identity != suites[of].identity
            assert [p.references for p in found.prompts] == [p.references for p in suites[of].prompts]
            assert [len(p.media) for p in found.prompts] == [control != "no_image"] * len(ids)


def test_the_direct_prompt_asks_in_the_form_that_the_reward_reads(prepared: Prepared) -> None:
    words = ("evaluation.controls=[direct_prompt]", "evaluation.direct_prompt='Only the digit.'")
    [_, direct, *_] = evaluator(prepared, *words).suites
    assert "? Answer in \\boxed{}. Only the digit. Answer in \\boxed{}.<|im_end|>" in direct.prompts[0].text


def test_controls_have_at_most_so_many_rows(prepared: Prepared) -> None:
    words = ("evaluation.controls=[blank_image]", "evaluation.max_control_prompts=3")
    assert [len(suite.prompts) for suite in evaluator(prepared, *words).suites] == [9, 3, 4, 3]


def test_without_controls_nothing_is_added_and_nothing_kept(prepared: Prepared) -> None:
    found = evaluator(prepared)
    assert [suite.name for suite in found.suites] == [HELD_OUT, "hard"]
    assert isinstance(found.kept, NothingKept)


def test_a_run_without_a_warm_start_keeps_what_controls_reach_before_it(prepared: Prepared, tmp_path: Path) -> None:
    assert isinstance(evaluator(prepared, f"evaluation.controls={ALL}").kept, NothingKept)  # it is warmed up
    cold = prepared.config.model_copy(
        update={"warm_start": prepared.config.warm_start.model_copy(update={"num_steps": 0}), "folder": tmp_path}
    )
    kept = evaluator(replace(prepared, config=cold), f"evaluation.controls={ALL}").kept
    assert isinstance(kept, ResultFiles) and kept.folder == tmp_path / ".evaluations"
