"""Checks of data and of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mobula.cluster.metrics.report.run_folder import Evidence, RunFinding, RunVerdict
from mobula.cluster.metrics.step_records import ControlGain
from mobula.configs.schema.run import Control
from mobula.deploy.preflight.checks import LoadedModel, find_mismatches
from mobula.deploy.preflight.findings import Severity
from mobula.deploy.report.diagnose.material import (
    DataSurvey,
    Material,
    Needs,
    PicturedRow,
    by_share,
    check,
    finding,
    unmeasured,
)
from mobula.learner.policies.adapters import adapted_modules
from mobula.learner.policies.families import frozen_prefixes
from mobula.learner.policies.shapes import layer_kind

SMALL = 0.5  # of the weights


@check("model_and_template", Needs.CONFIG)
def check_checkpoint(material: Material) -> RunFinding:
    """Runs the preflight of model files, tokenizer and chat template."""
    if material.model_problem:
        numbers = {"num_problems": 1.0}
        return finding(RunVerdict.FAULT, "1 problem refuses the run", numbers, material.model_problem)
    if material.model is None:
        return unmeasured("the files of policy.model are not on this machine")
    findings = list(find_mismatches(material.config, material.model))
    numbers = {"num_problems": float(len(findings))}
    measured = f"{len(findings)} mismatches of model files, tokenizer, chat template and configuration"
    if not findings:
        return finding(RunVerdict.OK, measured, numbers)
    refuses = any(each.severity is Severity.REFUSE for each in findings)
    evidence = tuple(Evidence(str(each)) for each in findings)
    verdict = RunVerdict.FAULT if refuses else RunVerdict.WARNING
    return finding(verdict, measured, numbers, findings[0].action, evidence)


@check("frozen_parts", Needs.MODEL, ("learning_rate", "skipped_steps", "reward_trend"))
def check_frozen(material: Material) -> RunFinding:
    """Share of the weights that `policy.freeze` leaves to train."""
    config, sizes = material.config.policy, _sizes(_model(material))
    frozen = () if material.config.sampler.is_flow else frozen_prefixes(config)
    total = sum(sizes.values())
    trained = sum(size for name, size in sizes.items() if not (frozen and name.startswith(frozen)))
    numbers = {"trained_fraction": trained / total, "num_trained": float(trained)}
    measured = f"policy.freeze={list(config.freeze)} leaves {trained / total:.1%} of {total:,} weights to train"
    if not config.freeze:
        return finding(RunVerdict.OK, measured, numbers)
    is_suspect = trained / total < SMALL and material.run is not None and not material.is_learning
    action = "take the part that has to learn out of policy.freeze (language: the decoder)"
    return finding(RunVerdict.WARNING if is_suspect else RunVerdict.NOTICE, measured, numbers, action)


@check("adapter_targets", Needs.MODEL)
def check_adapters(material: Material) -> RunFinding:
    """Layers that each entry of `policy.lora.target_modules` matches."""
    policy = material.config.policy
    if not policy.lora.is_on:
        return unmeasured("policy.lora.rank=0: the weights are trained, no adapters")
    modules = adapted_modules(_model(material).checkpoint, policy)
    kinds = {layer_kind(module) for module in modules}
    names = [target for target in policy.lora.target_modules if target not in ("language", "vision", "connector")]
    unbound = [target for target in names if target not in kinds]
    num = sum(policy.lora.rank * sum(shape) for shape in modules.values())
    numbers = {"num_layers": float(len(modules)), "num_trained": float(num), "num_unbound": float(len(unbound))}
    measured = f"{len(modules)} layers have adapters of rank {policy.lora.rank}, {num:,} numbers to train"
    action = f"policy.lora.target_modules: {', '.join(unbound)} matches no layer; there are {', '.join(sorted(kinds))}"
    return finding(RunVerdict.WARNING if unbound else RunVerdict.OK, measured, numbers, action)


def _sizes(model: LoadedModel) -> dict[str, int]:
    return {spec.name: math.prod(spec.shape) for spec in model.checkpoint.tensors}


def _model(material: Material) -> LoadedModel:
    assert material.model is not None, "the registry asks for a model first"
    return material.model


MOST, MANY, SOME = 0.5, 0.1, 0.02
NUM_SHOWN = 5


@check("duplicate_prompts", Needs.DATA)
def check_duplicates(material: Material) -> RunFinding:
    """Share of training rows with the question and the pictures of another row."""
    train = _data(material).train
    share = (train.num_read - len(train.rows)) / max(1, train.num_read)
    numbers = {"repeated_fraction": share, "num_rows": float(train.num_rows), "num_read": float(train.num_read)}
    measured = f"{share:.1%} of {train.num_read} training rows repeat the question and the pictures of another row"
    largest = sorted(train.rows.values(), key=len, reverse=True)[:NUM_SHOWN]
    equal = tuple(Evidence(f"{len(ids)} equal rows: {', '.join(ids[:4])}") for ids in largest if len(ids) > 1)
    evidence = (*equal, *_shown(train.repeated, "repeats an earlier row"))
    verdict = by_share(share, warning=MANY, notice=SOME)
    return finding(verdict, measured, numbers, "remove repeated rows from data.path", evidence)


@check("held_out_leak", Needs.DATA)
def check_leaks(material: Material) -> RunFinding:
    """Share of held-out rows that are training rows, too."""
    data = _data(material)
    if data.held_out.num_read == 0:
        return unmeasured(f"the split {data.held_out_name} has no readable row")
    leaked = data.leaked
    share = len(leaked) / data.held_out.num_read
    numbers = {"leaked_fraction": share, "num_held_out": float(data.held_out.num_read)}
    measured = (
        f"{share:.1%} of {data.held_out.num_read} rows of {data.held_out_name} are training rows, too (question and "
        f"pictures; {data.train.num_read} of {data.train.num_rows} training rows read)"
    )
    pngs = {row.sample_id: row.pngs for row in data.held_out.leaked}
    evidence = tuple(
        Evidence(f"{held_out} is {trained}", pngs=pngs.get(held_out, ())) for held_out, trained in leaked[:NUM_SHOWN]
    )
    verdict = by_share(share, fault=MANY, warning=SOME, notice=0.0 if leaked else math.inf)
    action = f"remove these rows from one of the splits: the accuracy on {data.held_out_name} counts memorised rows"
    return finding(verdict, measured, numbers, action, evidence)


@check("label_distribution", Needs.DATA)
def check_label_distribution(material: Material) -> RunFinding:
    """Share of the most frequent label, and of held-out labels that no training row has."""
    data = _data(material)
    labels, num = data.train.labels, max(1, data.train.labels.total())
    [(most, count)] = labels.most_common(1) or [("", 0)]
    held_out = data.held_out.labels
    unknown = sum(n for label, n in held_out.items() if label not in labels) / max(1, held_out.total())
    numbers = {"largest_share": count / num, "num_labels": float(len(labels)), "unknown_held_out": unknown}
    measured = (
        f"{len(labels)} different labels in {num} training rows, the most frequent {most[:40]!r} in {count / num:.1%}; "
        f"{unknown:.1%} of the labels of {data.held_out_name} occur in no training row"
    )
    evidence = tuple(Evidence(f"{label[:80]!r}: {n}") for label, n in labels.most_common(NUM_SHOWN))
    action = "nearly all labels are equal: check the column of the answer (data.columns.answer)"
    return finding(by_share(count / num, warning=0.9), measured, numbers, action, evidence)


@check("pictures", Needs.DATA, ("answers_and_labels", "uniform_groups", "reward_trend"))
def check_pictures(material: Material) -> RunFinding:
    """Share of blank pictures, and of rows whose pictures are those of another row."""
    train = _data(material).train
    if train.num_pictures == 0:
        return unmeasured("no training row has a picture")
    blank = train.num_blank / train.num_pictures
    shared = 1 - len(train.pictures) / max(1, train.pictures.total())
    numbers = {"blank_fraction": blank, "shared_fraction": shared, "num_pictures": float(train.num_pictures)}
    measured = (
        f"{blank:.1%} of {train.num_pictures} training pictures are blank; {shared:.1%} of the rows have the "
        "pictures of another row"
    )
    worst = max(blank, shared)
    if blank >= MANY or (shared >= MOST and len(train.texts) < len(train.pictures) * 2):
        verdict = RunVerdict.FAULT if worst >= MOST else RunVerdict.WARNING
        action = "check how the pictures of data.path were written: `mobula data inspect` shows them"
        evidence = (*_shown(train.blank, "is blank"), *_shown(train.shared, "has the pictures of an earlier row"))
        return finding(verdict, measured, numbers, action, evidence)
    return finding(RunVerdict.OK, measured, numbers)


def _shown(rows: Sequence[PicturedRow], what: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(f"{row.sample_id} {what}", pngs=row.pngs) for row in rows)


def _data(material: Material) -> DataSurvey:
    assert material.data is not None, "the registry asks for data first"
    return material.data


HALF, SOME = 0.5, 0.2  # of the gain
NO_CONTROLS = "the run has no such control (evaluation.controls)"


@check("gain_without_media", Needs.STEPS)
def check_without_media(material: Material) -> RunFinding:
    """How much of the gain a policy has that does not see its image."""
    found = [each for each in _controls(material) if each.control != Control.DIRECT_PROMPT]
    gained = [each for each in found if each.share is not None]
    if not gained:
        return unmeasured("the policy has gained nothing on the rows of the controls" if found else NO_CONTROLS)
    most = max(gained, key=lambda each: each.share or 0.0)
    policy = most.accuracy + most.gain
    measured = (
        f"{most.share:.0%} of the gain is there without the image: {most.control} goes from {most.before:.3f} to "
        f"{most.accuracy:.3f}, the policy from {most.policy_before:.3f} to {policy:.3f}"
    )
    action = "the answers follow from the texts: look at what the questions give away, and at data.max_pixels"
    return _judged(most, measured, action)


@check("direct_prompt", Needs.STEPS)
def check_direct_prompt(material: Material) -> RunFinding:
    """What the policy reached before RL when it was asked for the answer alone."""
    found = next((each for each in _controls(material) if each.control == Control.DIRECT_PROMPT), None)
    if found is None or found.policy_before is None:
        return unmeasured(NO_CONTROLS if found is None else "the run was evaluated once")
    measured = (
        f"the policy before RL reaches {found.accuracy:.3f} when it is asked for the answer alone, "
        f"{found.policy_before:.3f} with the prompts of training; after RL {found.accuracy + found.gain:.3f}"
    )
    action = "the gain is that of a shorter prompt: compare with the direct answer, and train from it"
    return _judged(found, measured, action)


def _judged(control: ControlGain, measured: str, action: str) -> RunFinding:
    share = control.share or 0.0
    numbers = {
        "share": share,
        "control": control.accuracy,
        "gain": control.gain,
        "low": control.low,
        "high": control.high,
    }
    text = f"{measured} (gain over it {control.gain:+.3f}, 95 % {control.low:+.3f} to {control.high:+.3f})"
    if share >= HALF or control.low <= 0:
        return finding(RunVerdict.WARNING, text, numbers, action)
    return finding(RunVerdict.NOTICE if share >= SOME else RunVerdict.OK, text, numbers)


def _controls(material: Material) -> Sequence[ControlGain]:
    evaluations = material.run.evaluations if material.run else ()
    return evaluations[-1].controls if evaluations else ()
