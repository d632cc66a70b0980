"""Checks of `mobula diagnose`: each reports its fault with a number, and none reports a fault of a healthy run."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from metrics_data import make_group
from PIL import Image
from rich.console import Console

from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.guard_events import GuardEvent
from mobula.cluster.metrics.report.run_folder import (
    Evidence,
    RunFinding,
    RunFolder,
    RunVerdict,
    causes_first,
    in_folder,
    read_findings,
    read_run_folder,
    to_json,
    with_files,
    write_findings,
)
from mobula.cluster.metrics.report.samples import AnswerGroup, KeptAnswer, SampleFile
from mobula.cluster.metrics.step_records import ControlGain, EvaluationRecord, StepRecord
from mobula.cluster.records.media import MediaHandle, MediaSpan
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.workers.faults import Fault
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.pages.report import render_report
from mobula.deploy.report.diagnose import material as checks
from mobula.deploy.report.diagnose.command import diagnose_records, show, subject_of
from mobula.deploy.report.diagnose.trials import TrialGroup, ablate_pictures, judged, memorise, run_trials, scan

NUM_STEPS = 32

RECORDED = Path(__file__).parents[3] / "support" / "recorded_runs"

HEALTHY: Mapping[str, float] = {
    **dict.fromkeys((MetricName.REWARD_MIN, MetricName.TRUNCATED_FRACTION, "skipped"), 0.0),
    **dict.fromkeys((MetricName.OVER_AGE_TOKENS, MetricName.STALENESS_MAX), 0.0),
    **dict.fromkeys((MetricName.REWARD_MAX, MetricName.GRAD_NORM, MetricName.OPTIMIZER_STEPS), 1.0),
    **dict.fromkeys((MetricName.LOGPROB_GAP_MEAN, MetricName.LOGPROB_GAP_FIRST, MetricName.LOGPROB_GAP_LAST), 1e-6),
    MetricName.CANARY: 1e-6,
    MetricName.UNIFORM_FRACTION: 0.3,
    MetricName.UNIFORM_RIGHT_FRACTION: 0.2,
    MetricName.UNIFORM_WRONG_FRACTION: 0.1,
    MetricName.RESPONSE_LENGTH: 4.0,
    MetricName.NUM_SAMPLES: 64.0,
    MetricName.NUM_TOKENS: 256.0,
    MetricName.NUM_GROUPS: 8.0,
    MetricName.POLICY_CHANGE: 0.03,
    MetricName.WEIGHT_CHANGE: 3e-4,
    MetricName.LEARNING_RATE: 5e-4,
    MetricName.CLIP_FRACTION: 0.01,
    MetricName.ENTROPY: 0.3,
}
FLAT = {MetricName.REWARD_MEAN: 0.4, MetricName.ACCURACY: 0.4}


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(["experiment=digits", f"num_steps={NUM_STEPS}"])


def step(number: int, changes: Mapping[str, float], **fields: Any) -> StepRecord:
    noise, share = 0.01 * random.Random(number).random(), number / NUM_STEPS
    risen = {MetricName.ACCURACY: 0.4 + 0.3 * share, MetricName.REWARD_MEAN: 0.4 + 0.3 * share + noise}
    counters = {CounterName.WEIGHT_SYNCS: {"all": number + 1}}
    fields = {"components": {"accuracy": 0.5}, "correlations": {"accuracy": 1.0}, "counters": counters} | fields
    values = {**HEALTHY, **risen, MetricName.KL: 0.1 * share, **changes}
    return StepRecord(number, {"total": 1.0}, values, {0: 256}, **fields)


def answers(text: Callable[[str, int], str], finish_reason: str = "stop") -> tuple[AnswerGroup, ...]:
    """Four groups a step with four answers each; `text` is a function of label and number of the sibling."""
    return tuple(
        AnswerGroup(number // 4 + 1, f"row-{number}", (label,), tuple(
            KeptAnswer(text(label, n), float(text(label, n) == label), {"accuracy": float(text(label, n) == label)}, {},
                       finish_reason, 4, 0.0)
            for n in range(4)
        ))
        for number, label in enumerate(str(i * 7 % 10) for i in range(4 * NUM_STEPS))
    )  # fmt: skip


def right_half_the_time(label: str, sibling: int) -> str:
    return label if sibling % 2 else str((int(label) + 1) % 10)


def material(config: RunConfig, changes: Mapping[str, float] | None = None, **run: Any) -> checks.Material:
    drawn = run.pop("answers", answers(right_half_the_time))
    fields = {name: run.pop(name) for name in ("components", "correlations", "counters") if name in run}
    steps = [step(number, changes or {}, **fields) for number in range(1, NUM_STEPS + 1)]
    folder = RunFolder("r", steps, (), {}, SampleFile((), {}, drawn), None, (), (), (), "")
    return checks.Material(config, replace(folder, **run), lambda: survey())


def survey(**changes: Any) -> checks.DataSurvey:
    def split(start: int, num: int) -> checks.SplitSurvey:
        found = checks.SplitSurvey(num, {f"key-{i}": [f"row-{i}"] for i in range(start, start + num)})
        found.labels.update(str(i % 10) for i in range(num))
        found.pictures.update(f"picture-{i}" for i in range(start, start + num))
        found.texts["which digit is this?"], found.num_pictures = num, num
        return found

    train, held_out = split(0, 200), split(1000, 50)
    for name, value in changes.items():
        setattr(train, name, value)
    return checks.DataSurvey(train, held_out, "test")


def findings(of: checks.Material) -> dict[str, RunFinding]:
    return {finding.name: finding for finding in checks.run_checks(checks.CHECKS, of)}


def test_a_healthy_run_has_neither_fault_nor_warning(config: RunConfig) -> None:
    found = findings(material(config))
    serious = [f for f in found.values() if f.verdict in (RunVerdict.FAULT, RunVerdict.WARNING)]
    assert serious == []
    assert sum(f.verdict is RunVerdict.OK for f in found.values()) >= 20
    assert all(f.numbers for f in found.values() if f.verdict is not RunVerdict.NOT_MEASURED)


CASES: dict[str, tuple[str, RunVerdict, Mapping[str, float]]] = {
    "groups without a difference": ("uniform_groups", RunVerdict.FAULT, {MetricName.UNIFORM_FRACTION: 1.0}),
    "cut responses": ("truncation", RunVerdict.FAULT, {MetricName.TRUNCATED_FRACTION: 1.0}),
    "a third cut": ("truncation", RunVerdict.WARNING, {MetricName.TRUNCATED_FRACTION: 0.4}),
    "a small step": ("learning_rate", RunVerdict.FAULT, {MetricName.POLICY_CHANGE: 1e-4, **FLAT}),
    "a large step": ("learning_rate", RunVerdict.FAULT, {MetricName.POLICY_CHANGE: 3.0, **FLAT}),
    "not finite": ("skipped_steps", RunVerdict.FAULT, {"skipped": 1.0, MetricName.OPTIMIZER_STEPS: 0.0}),
    "no gradient": ("skipped_steps", RunVerdict.FAULT, {MetricName.GRAD_NORM: 0.0}),
    "clipped ratios": ("clipped_tokens", RunVerdict.WARNING, {MetricName.CLIP_FRACTION: 0.3}),
    "old tokens": ("over_age_tokens", RunVerdict.FAULT, {MetricName.OVER_AGE_TOKENS: 200.0}),
    "no exploration": ("entropy", RunVerdict.FAULT, {MetricName.ENTROPY: 0.001, **FLAT}),
    "a far policy": ("kl", RunVerdict.WARNING, {MetricName.KL: 2.0, **FLAT}),
    "a gap at the first token": ("logprob_gap", RunVerdict.FAULT, {MetricName.LOGPROB_GAP_FIRST: 0.1}),
    "a canary": ("engine_weights", RunVerdict.FAULT, {MetricName.CANARY: 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_changed_number_is_found_by_its_check(case: str, config: RunConfig) -> None:
    name, verdict, changes = CASES[case]
    found = findings(material(config, changes))[name]
    assert (found.verdict, bool(found.action)) == (verdict, True), found


def test_a_decay_that_leaves_little_of_the_weights_is_found() -> None:
    def decayed(by: float) -> RunFinding:
        words = ["experiment=digits", f"num_steps={NUM_STEPS}", f"learner.weight_decay={by}"]
        return findings(material(load_config(words)))["weight_decay"]

    large = decayed(100)
    assert large.verdict is RunVerdict.WARNING
    assert large.numbers["lost"] == pytest.approx(1 - math.exp(-100 * 5e-4 * NUM_STEPS))
    assert decayed(0.1).verdict is RunVerdict.OK


def test_unparsed_answers_are_counted_without_those_that_were_compared(config: RunConfig) -> None:
    def counted(reason: str, num: int) -> RunFinding:
        counters = {CounterName.WEIGHT_SYNCS: {"all": 99}, CounterName.REWARD_REASONS: {f"accuracy: {reason}": num}}
        steps = [replace(s, counters=counters if s.step > 24 else {}) for s in material(config).steps]
        return findings(material(config, steps=steps))["reward_parser"]

    assert counted("no \\boxed{} answer", 500).verdict is RunVerdict.FAULT
    assert counted("no \\boxed{} answer", 200).verdict is RunVerdict.WARNING
    assert counted("another value", 500).verdict is RunVerdict.OK


def test_a_reward_against_its_accuracy_and_one_that_follows_length_are_found(config: RunConfig) -> None:
    assert findings(material(config, correlations={"accuracy": -1.0}))["reward_components"].verdict is RunVerdict.FAULT
    followed = {"accuracy": 0.6, "length": 0.95}
    assert findings(material(config, correlations=followed))["reward_and_length"].verdict is RunVerdict.WARNING


def rewarded(reward: Callable[[str, str, int], float], text: Callable[[str, int], str]) -> tuple[AnswerGroup, ...]:
    """As `answers`, with rewards by label, text and a running number."""
    numbers = iter(range(10**6))

    def scored(answer: KeptAnswer, label: str) -> KeptAnswer:
        return replace(answer, reward=reward(label, answer.text, next(numbers)))

    return tuple(replace(g, answers=tuple(scored(a, g.references[0]) for a in g.answers)) for g in answers(text))


def coin(label: str, text: str, number: int) -> float:
    return float(random.Random(f"coin {number}").random() < 0.5)


def test_a_coin_flip_is_found_where_responses_repeat_and_where_they_do_not(config: RunConfig) -> None:
    found = findings(material(config, FLAT, answers=rewarded(coin, right_half_the_time)))["reward_noise"]
    assert found.verdict is RunVerdict.FAULT and found.numbers["equal_disagree"] > 0.4
    assert "has the rewards" in found.evidence[0].text

    def prose(label: str, sibling: int) -> str:
        return f"word{sibling} {label * (sibling + 1)} is it" if sibling % 2 else f"{label} or {sibling}"

    different = findings(material(config, FLAT, answers=rewarded(coin, prose)))["reward_noise"]
    assert different.verdict is RunVerdict.WARNING and different.numbers["num_pairs"] == 0


def test_a_reward_of_label_or_length_is_no_noise(config: RunConfig) -> None:
    def of_label(label: str, text: str, number: int) -> float:
        return float(text == label)

    def of_length(label: str, text: str, number: int) -> float:
        return len(text) / 10

    def longer(label: str, sibling: int) -> str:
        return "x" * (sibling + 1)

    for reward, text in ((of_label, right_half_the_time), (of_length, longer)):
        found = findings(material(config, FLAT, answers=rewarded(reward, text)))["reward_noise"]
        assert found.verdict is RunVerdict.OK, found


def test_an_accuracy_that_is_high_while_answers_are_not_the_labels_is_a_warning(config: RunConfig) -> None:
    def any_digit(label: str, sibling: int) -> str:
        return str((int(label) * 3 + sibling * 7 + 1) % 10)

    solved = {MetricName.ACCURACY: 0.95, MetricName.REWARD_MEAN: 0.95}
    found = findings(material(config, solved, answers=answers(any_digit)))["answers_and_labels"]
    assert found.verdict is RunVerdict.WARNING and "rewards.accuracy_component" in found.action


def evaluated(*accuracies: float, temperature: float = 0.0) -> tuple[EvaluationRecord, ...]:
    own = {"temperature": temperature}
    return tuple(EvaluationRecord(4 * n, a, a - 0.05, a + 0.05, 64, identity=own) for n, a in enumerate(accuracies))


@pytest.mark.parametrize(
    ("greedy", "sampled", "temperature", "verdict"),
    [
        (0.55, 0.02, 0.0, RunVerdict.FAULT),
        (0.55, 0.25, 0.0, RunVerdict.WARNING),
        (0.55, 0.45, 0.0, RunVerdict.OK),
        (0.05, 0.6, 0.0, RunVerdict.WARNING),  # held-out rows have other labels
        (0.55, 0.02, 1.0, RunVerdict.NOT_MEASURED),  # this evaluation samples
    ],
)
def test_greedy_accuracy_is_compared_with_what_the_same_weights_sample(
    greedy: float, sampled: float, temperature: float, verdict: RunVerdict, config: RunConfig
) -> None:
    changes = {MetricName.ACCURACY: 0.9, MetricName.SAMPLED_ACCURACY: sampled}
    run = material(config, changes, evaluations=evaluated(greedy, greedy, temperature=temperature))
    assert findings(run)["greedy_and_sampled"].verdict is verdict


def controlled(*gains: ControlGain) -> tuple[EvaluationRecord, ...]:
    return (EvaluationRecord(0, 0.5, 0.4, 0.6, 64), EvaluationRecord(32, 0.8, 0.7, 0.9, 64, controls=gains))


@pytest.mark.parametrize(
    ("after", "low", "verdict", "said"),
    [
        (0.74, 0.02, RunVerdict.WARNING, "80% of the gain is there without the image: blank_image goes from 0.500 to"),
        (0.79, -0.01, RunVerdict.WARNING, "97% of the gain"),
        (0.6, 0.1, RunVerdict.NOTICE, "33% of the gain"),
        (0.5, 0.2, RunVerdict.OK, "0% of the gain"),
    ],
)
def test_a_gain_that_is_there_without_the_image_is_a_warning(
    after: float, low: float, verdict: RunVerdict, said: str, config: RunConfig
) -> None:
    gain = ControlGain("blank_image", after, 0.8 - after, low, 0.9, 64, before=0.5, policy_before=0.5)
    other = ControlGain("no_image", 0.1, 0.7, 0.6, 0.8, 64, before=0.1, policy_before=0.5)
    found = findings(material(config, evaluations=controlled(other, gain)))["gain_without_media"]
    assert found.verdict is verdict and said in found.measured, found


def test_what_the_base_reaches_when_asked_directly_is_said(config: RunConfig) -> None:
    gain = ControlGain("direct_prompt", 0.79, 0.01, -0.05, 0.07, 64, before=0.5, policy_before=0.5)
    found = findings(material(config, evaluations=controlled(gain)))["direct_prompt"]
    assert (
        found.verdict is RunVerdict.WARNING and "reaches 0.790 when it is asked for the answer alone" in found.measured
    )
    assert findings(material(config, evaluations=controlled()))["direct_prompt"].verdict is RunVerdict.NOT_MEASURED


LOST = {MetricName.TRUNCATED_FRACTION: 1.0, MetricName.UNIFORM_FRACTION: 1.0, MetricName.KL: 3.0, **FLAT}


def test_a_learning_rate_comes_before_the_faults_that_it_causes(config: RunConfig) -> None:
    found = causes_first(list(findings(material(config, {**LOST, MetricName.POLICY_CHANGE: 1.4})).values()))
    assert (found[0].name, found[0].verdict) == ("learning_rate", RunVerdict.WARNING)
    assert {each.name for each in found[1:4]} == {"truncation", "uniform_groups", "kl"}
    assert all(each.action.startswith("may follow from learning_rate, see there first; ") for each in found[1:4])


def test_a_temperature_comes_before_the_faults_that_it_causes(config: RunConfig) -> None:
    run = material(config, {**LOST, MetricName.ACCURACY: 0.01}, evaluations=evaluated(0.55, 0.5))
    found = causes_first(list(findings(run).values()))
    assert found[0].name == "greedy_and_sampled" and "sampler.temperature" in found[0].action
    assert found[1].action.startswith("may follow from greedy_and_sampled")


def test_a_fault_that_nothing_explains_stays_before_milder_ones_and_circles_end(config: RunConfig) -> None:
    def finding(name: str, verdict: RunVerdict, *explains: str) -> RunFinding:
        return RunFinding(name, verdict, name, {"n": 1.0}, "act", (), explains)

    warning, fault = RunVerdict.WARNING, RunVerdict.FAULT
    alone = finding("alone", fault)
    circle = [finding("a", warning, "b"), finding("b", warning, "c"), finding("c", warning, "a")]
    found = causes_first([*circle, alone, finding("ok", RunVerdict.OK, "alone")])
    assert [each.name for each in found] == ["alone", "a", "b", "c", "ok"]
    assert found[0].action == "act" and found[2].action == "may follow from a, see there first; act"


def test_an_evaluation_that_changed_is_no_sign_of_exploitation(config: RunConfig) -> None:
    evaluations = [replace(FALLEN[n], identity={"split": split}) for n, split in enumerate(("test", "validation"))]
    found = findings(material(paid_for_form(config), evaluations=evaluations))["reward_exploitation"]
    assert found.verdict is RunVerdict.OK and "split test -> validation" in found.measured
    assert "held_out_before" not in found.numbers


def test_an_accuracy_without_weight_that_falls_while_the_reward_rises_is_exploitation(config: RunConfig) -> None:
    found = findings(material(paid_for_form(config), evaluations=FALLEN))["reward_exploitation"]
    assert found.verdict is RunVerdict.FAULT and "held-out accuracy" in found.measured


def test_an_action_of_the_guard_is_a_sign_of_exploitation(config: RunConfig) -> None:
    event = GuardEvent(12, "judge", "warn", 2.0, 8, "the judge falls by 4 standard errors", 1.0)
    found = findings(material(config, guard=(event,)))["reward_exploitation"]
    assert found.verdict is RunVerdict.FAULT and found.evidence[0].text == event.text


FALLEN = (EvaluationRecord(0, 0.6, 0.55, 0.65, 64), EvaluationRecord(32, 0.2, 0.15, 0.25, 64))


def paid_for_form(config: RunConfig) -> RunConfig:
    values = config.model_dump()
    component = {"name": "paid", "function": "format", "weight": 1.0, "options": {"preset": "boxed"}}
    values["rewards"] |= {"components": [component], "accuracy_component": "paid"}
    return RunConfig.model_validate(values)


def test_answers_that_do_not_depend_on_labels_are_a_fault(config: RunConfig) -> None:
    draw = random.Random(3)
    found = findings(material(config, FLAT, answers=answers(lambda label, n: str(draw.randrange(10)))))
    assert found["answers_and_labels"].verdict is RunVerdict.FAULT, found["answers_and_labels"]
    foreign = findings(material(config, FLAT, answers=answers(lambda label, n: "dog")))["answers_and_labels"]
    assert foreign.verdict is RunVerdict.WARNING and foreign.numbers["answers_in_labels"] == 0


def test_equal_siblings_and_responses_without_an_end_are_found(config: RunConfig) -> None:
    found = findings(material(config, FLAT, answers=answers(lambda label, n: "7", "length")))
    assert found["variety"].verdict is RunVerdict.FAULT and found["end_of_text"].verdict is RunVerdict.FAULT


def test_an_engine_that_was_replaced_for_its_weights_is_found_with_its_cause(config: RunConfig) -> None:
    cause = "the canary of version 3 differs by 0.2 nat"
    found = findings(material(config, faults=(Fault(0.0, "rollout/0", "lost", cause, 3),)))["engine_weights"]
    assert found.verdict is RunVerdict.FAULT and cause in found.evidence[0].text


def test_the_weight_of_the_kl_term_is_checked_before_the_first_step(config: RunConfig) -> None:
    strong = config.model_copy(update={"algorithm": config.algorithm.model_copy(
        update={"kl": config.algorithm.kl.model_copy(update={"coef": 10.0})})})  # fmt: skip
    found = findings(checks.Material(strong))
    assert found["kl_weight"].verdict is RunVerdict.FAULT
    uniform = found["uniform_groups"]
    assert uniform.verdict is RunVerdict.NOT_MEASURED and "no finished step" in uniform.measured


def test_duplicates_leaks_blank_pictures_and_one_label_are_found(config: RunConfig) -> None:
    repeated = {f"key-{i}": [f"row-{i}", f"copy-{i}"] for i in range(100)}
    cases = {
        "duplicate_prompts": (survey(rows=repeated), RunVerdict.WARNING),
        "held_out_leak": (survey(rows={f"key-{i}": [f"row-{i}"] for i in range(1000, 1020)}), RunVerdict.FAULT),
        "pictures": (survey(num_blank=200), RunVerdict.FAULT),
    }
    for name, (surveyed, verdict) in cases.items():
        found = findings(replace(material(config), read_data=lambda surveyed=surveyed: surveyed))[name]
        assert found.verdict is verdict, found
    alike = survey()
    alike.train.labels["0"] += 10_000
    found = findings(replace(material(config), read_data=lambda: alike))["label_distribution"]
    assert found.verdict is RunVerdict.WARNING


def png(colour: int) -> bytes:
    content = BytesIO()
    Image.new("RGB", (8, 8), (colour, 0, 0)).save(content, format="PNG")
    return content.getvalue()


def test_pictures_of_the_data_are_evidence_in_json_and_in_the_report(config: RunConfig, tmp_path: Path) -> None:
    shown = [checks.PicturedRow("row-3", (png(1), png(2)))]
    found = findings(replace(material(config), read_data=lambda: survey(num_blank=200, blank=shown)))["pictures"]
    [written] = with_files([found], tmp_path)
    pictures = ("diagnosis/pictures-0-0.png", "diagnosis/pictures-0-1.png")
    assert written.evidence[0] == Evidence("row-3 is blank", pictures)
    write_findings(tmp_path, [written])
    assert (tmp_path / "diagnosis/pictures-0-1.png").read_bytes() == png(2)
    assert base64.b64encode(png(2)).decode() in render_report(read_run_folder(tmp_path))
    [row] = json.loads(to_json(in_folder([written], tmp_path)))
    assert [Path(image).read_bytes() for image in row["evidence"][0]["images"]] == [png(1), png(2)]


def test_responses_that_mix_more_scripts_are_found_with_samples(config: RunConfig) -> None:
    texts = iter(["the answer is four"] * 256 + ["the ответ это four"] * 256)
    mixed = answers(lambda label, n: label)
    mixed = tuple(replace(g, answers=tuple(replace(a, text=next(texts)) for a in g.answers)) for g in mixed)
    found = findings(material(config, answers=mixed))["language_mix"]
    assert found.verdict is RunVerdict.WARNING and found.numbers["mix_early"] == 0
    assert "ответ" in found.evidence[0].text
    same = tuple(replace(g, answers=tuple(replace(a, text="la réponse") for a in g.answers)) for g in mixed)
    assert findings(material(config, answers=same))["language_mix"].verdict is RunVerdict.OK
    assert findings(material(config))["language_mix"].verdict is RunVerdict.NOT_MEASURED, "digits have no letters"


def test_the_gap_of_the_prompt_is_shown_by_class_of_token(config: RunConfig) -> None:
    gaps = {MetricName.CANARY_MEDIA: 2e-6, MetricName.CANARY_TEMPLATE: 1e-6, MetricName.CANARY_TEXT: 3e-6}
    found = findings(material(config, gaps))["logprob_gap"]
    assert found.verdict is RunVerdict.OK
    assert {"prompt media": 2e-6, "prompt template": 1e-6, "prompt text": 3e-6}.items() <= found.numbers.items()


def test_a_model_that_is_refused_is_a_fault_with_the_refusal_as_the_next_action(config: RunConfig) -> None:
    def refuse() -> None:
        raise PreflightError("policy.lora.target_modules: no matrix of the model is called attn_proj")

    found = findings(checks.Material(config, read_model=refuse))["model_and_template"]
    assert found.verdict is RunVerdict.FAULT and "attn_proj" in found.action


def test_a_run_without_a_finished_step_is_a_fault_with_the_reasons(config: RunConfig) -> None:
    def of(status: str, num: int) -> RunFinding:
        error = "StepError: 96 groups rejected at cluster/controller.py:80 in run" if status == "failed" else ""
        ended = SimpleNamespace(status=status, rejected={"too_few_scored": 96}, error=error)
        fault = Fault(0.0, "reward/0", "died", "ValueError: no answer")
        whole = material(config, summary=ended, faults=(fault,))
        return findings(replace(whole, run=replace(whole.run, steps=whole.steps[:num])))["finished_steps"]

    failed = of("failed", 0)
    assert failed.verdict is RunVerdict.FAULT and failed.numbers == {"finished": 0, "planned": NUM_STEPS}
    assert failed.measured.endswith("; it ended with StepError: 96 groups rejected at cluster/controller.py:80 in run")
    assert [each.text for each in failed.evidence] == [
        "96 groups were rejected: too_few_scored", "reward/0: ValueError: no answer",
    ]  # fmt: skip
    assert [of(*case).verdict for case in (("failed", 3), ("stopped", 3), ("done", NUM_STEPS))] == [
        RunVerdict.WARNING, RunVerdict.NOTICE, RunVerdict.OK,
    ]  # fmt: skip


def test_an_ablated_check_does_not_hide_the_others(config: RunConfig) -> None:
    broken = material(config, steps=[StepRecord(1, {"total": 1.0}, {}, {}, {}, {})])
    found = findings(broken)
    assert len(found) == len(checks.CHECKS) and found["reward_parser"].verdict is RunVerdict.NOT_MEASURED


def test_a_verdict_without_a_number_is_refused() -> None:
    with pytest.raises(AssertionError, match="needs a number"):
        RunFinding("check", RunVerdict.FAULT, "it does not learn")


def test_findings_survive_the_file_and_the_worst_is_shown_first(tmp_path: Path) -> None:
    evidence = (Evidence("a\x1b[0m", ("k",)),)
    fault = RunFinding("b", RunVerdict.FAULT, "3 of 4", {"share": float("inf")}, "change k.ey", evidence)
    given = [RunFinding("a", RunVerdict.OK, "1 of 4", {"share": 0.25}), fault]
    write_findings(tmp_path, causes_first(given))
    assert read_findings(tmp_path) == [fault, given[0]]
    assert read_findings(tmp_path / "absent") == []
    console = Console(width=100, record=True)
    show("run r", causes_first(given), console)
    text = console.export_text()
    assert text.index("3 of 4") < text.index("1 of 4") and "1 fault, 1 ok" in text and "change k.ey" in text


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="there is no run in"):
        subject_of(["no-such-run"], None)


def test_trends_and_agreement_state_their_error() -> None:
    assert checks.Trend.of([1.0] * 7) is None
    rising = checks.Trend.of([0.1 * i for i in range(20)])
    assert rising.rises and not rising.falls
    flat = checks.Trend.of([0.5, 0.6, 0.4, 0.5, 0.6, 0.4, 0.5, 0.6, 0.4, 0.5, 0.6, 0.4])
    assert not flat.rises and not flat.falls
    half = checks.Agreement.of([("a", ["a", "b"]), ("b", ["b", "a"])] * 20)
    assert half.kappa == pytest.approx(0) and half.expected == pytest.approx(0.5)
    assert checks.Agreement.of([("a", ["a"])]) is None


def recorded(name: str, folder: Path) -> dict[str, RunFinding]:
    """Findings on the files of a run that was recorded from `mobula train`."""
    run = Path(shutil.copytree(RECORDED / name, folder / name))
    diagnose_records(run)
    return {finding.name: finding for finding in read_findings(run)}


def test_a_recorded_run_that_goes_on_is_diagnosed_from_its_finished_steps(tmp_path: Path) -> None:
    found = recorded("live", tmp_path)
    assert found["finished_steps"].verdict is RunVerdict.OK and "not ended" in found["finished_steps"].measured
    assert found["finished_steps"].numbers == {"finished": 12, "planned": 40}
    assert found["engine_weights"].verdict is RunVerdict.OK
    assert {"all", "prompt media", "prompt template"} <= found["logprob_gap"].numbers.keys()
    assert found["reward_parser"].verdict in (RunVerdict.FAULT, RunVerdict.WARNING), "it was hardly taught the form"


def test_a_recorded_run_that_failed_before_its_first_step_is_a_fault(tmp_path: Path) -> None:
    found = recorded("failed", tmp_path)
    assert found["finished_steps"].verdict is RunVerdict.FAULT and "failed" in found["finished_steps"].measured
    assert [name for name, finding in found.items() if finding.verdict is RunVerdict.FAULT] == ["finished_steps"]


def trial_group(index: int, rewards: Sequence[float] = (0.0, 1.0, 0.0)) -> TrialGroup:
    """Three responses; the tokens of a response are its number in the group."""
    scored = make_group(f"s{index}", rewards)
    group = scored.group
    trajectories = tuple(
        replace(each, actions=replace(each.actions, token_ids=np.full(each.num_steps, n, dtype=np.int32)))
        for n, each in enumerate(group.trajectories)
    )
    media, spans = (MediaHandle(f"s{index}-0", "image", 4, None),), (MediaSpan(0, 1),)
    prompt = replace(group.prompt, references=(str(index % 3),), media=media, media_spans=spans)
    return TrialGroup(scored, prompt, trajectories)


class TableLearner:
    """A policy with one logit for each of three answers; an update moves the right one by `rate`."""

    def __init__(self, rate: float, *, looks: bool = True) -> None:
        self.logits = np.zeros(3)
        self._rate = rate
        self._looks = looks

    async def load(self, folder: Path) -> int:
        self.logits = np.zeros(3)
        return 0

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        self.logits[1] += self._rate
        return UpdateReport(1, {})

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray:
        logprobs = self.logits - np.log(np.exp(self.logits).sum())
        own = prompt.sample_id.removeprefix("s")
        is_own = prompt.media[0].key.startswith(f"s{own}-")
        shift = 0.0 if is_own or not self._looks else 0.5 + 0.01 * int(own)
        return np.array([0.0, *(logprobs[token % 3] - shift for token in prompt.expanded_ids[1:])])


GROUPS = [trial_group(n) for n in range(16)]


def test_a_learner_that_learns_memorises_one_prompt_and_one_that_does_not_is_named() -> None:
    assert asyncio.run(memorise(TableLearner(0.2), GROUPS)).verdict is RunVerdict.OK
    still = asyncio.run(memorise(TableLearner(0.0), GROUPS))
    assert still.verdict is RunVerdict.WARNING and still.numbers["gain"] == pytest.approx(0)
    assert asyncio.run(memorise(TableLearner(-0.2), GROUPS)).verdict is RunVerdict.FAULT
    uniform = [trial_group(0, (1.0, 1.0, 1.0))]
    assert asyncio.run(memorise(TableLearner(0.2), uniform)).verdict is RunVerdict.NOT_MEASURED


def test_a_group_whose_best_response_is_likely_is_not_memorised() -> None:
    learner = TableLearner(-0.2)  # moves away from a likely response
    learner.logits[1] = 5.0
    assert asyncio.run(memorise(learner, GROUPS)).verdict is RunVerdict.NOT_MEASURED
    unlikely = [trial_group(0), trial_group(1, (1.0, 0.0, 0.0))]
    assert asyncio.run(memorise(learner, unlikely)).numbers["before"] < -4


def test_pictures_of_another_prompt_lower_the_log_prob_only_where_the_policy_looks() -> None:
    seen = asyncio.run(ablate_pictures(TableLearner(0.0), GROUPS))
    assert seen.verdict is RunVerdict.OK and seen.numbers["drop"] > 0.4
    blind = asyncio.run(ablate_pictures(TableLearner(0.0, looks=False), GROUPS))
    assert blind.verdict is RunVerdict.WARNING and blind.numbers["drop"] == 0
    assert asyncio.run(ablate_pictures(TableLearner(0.0), GROUPS[:2])).verdict is RunVerdict.NOT_MEASURED


def test_a_learning_rate_that_is_far_too_small_is_named_with_its_factor() -> None:
    async def start(factor: float) -> TableLearner:
        return TableLearner(0.001 * factor)

    found = asyncio.run(scan(start, GROUPS, Path("unused")))
    assert found.numbers["gain_x10"] > found.numbers["gain_x1"] > found.numbers["gain_x0.1"] > 0
    small = judged({0.1: (0.0, 1e-3), 1.0: (1e-3, 1e-3), 10.0: (0.1, 1e-2)})
    assert small.verdict is RunVerdict.WARNING and small.action == "try learner.learning_rate times 10"
    large = judged({0.1: (0.1, 1e-2), 1.0: (-0.5, 1e-2), 10.0: (-2.0, 1e-2)})
    assert large.verdict is RunVerdict.WARNING and large.action == "try learner.learning_rate times 0.1"
    assert judged({0.1: (0.01, 1e-3), 1.0: (0.1, 1e-3), 10.0: (0.3, 0.1)}).verdict is RunVerdict.OK


def test_trials_without_recorded_groups_say_what_is_missing(tmp_path: Path) -> None:
    config = load_config(["experiment=digits"])
    assert {finding.measured for finding in run_trials(None, config)} == {"trials need the recorded groups of a run"}
    missing = {finding.measured for finding in run_trials(tmp_path, config)}
    assert missing == {"the run has no recorded step: run with replay.trajectory_log=true"}
