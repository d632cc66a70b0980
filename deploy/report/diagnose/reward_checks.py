"""Checks of recorded responses and of their rewards."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from mobula.cluster.guard.signs import script_mix
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.report.run_folder import Evidence, RunFinding, RunVerdict
from mobula.cluster.metrics.report.samples import MAX_ANSWER_CHARACTERS, AnswerGroup, KeptAnswer
from mobula.cluster.metrics.step_records import LENGTH, TINY, BeforeAfter
from mobula.configs.schema import RunConfig
from mobula.deploy.report.diagnose.material import (
    MIN_POINTS,
    NOTHING_TO_COMPARE,
    SURE,
    SYMPTOMS,
    Agreement,
    Material,
    Needs,
    Trend,
    by_share,
    check,
    finding,
    mean,
    unmeasured,
)

OPPOSED, CONFLICT = -0.5, -0.3
MUCH, SOME = 0.8, 0.5
MIN_PAIRS, MIN_RESPONSES, MIN_STEPS = 30, 100, 15
SAME, RARELY = 0.5, 0.1  # of the disagreement of different responses
NUM_SHOWN = 3

RANDOM = (
    "the reward is not a function of the response: check that rewards belong to their responses (order of a batch, "
    "cache, state of the function), and that a judge or model samples greedily; `mobula score` twice must agree"
)

UNRELATED = (
    "the reward varies within groups, follows nothing that was looked at, and does not rise: compare a few responses "
    "of one group with their rewards (`mobula score --results`)"
)

SHAPED = "use algorithm=dr_grpo or dapo, the reward overlong, or algorithm.shaping.length_penalty"


@check("reward_components", Needs.STEPS, SYMPTOMS)
def check_components(material: Material) -> RunFinding:
    """Checks that the reward rises with the component of accuracy, and that components do not oppose each other."""
    found = {name: values for name, values in _columns(material) if name != LENGTH}
    if not found:
        return unmeasured("no component varied within a group")
    accuracy = material.config.rewards.accuracy_component
    numbers = {name: mean(values) for name, values in found.items()}
    measured = "correlation within groups: " + ", ".join(f"{name} {value:+.2f}" for name, value in numbers.items())
    own = numbers.get(accuracy)
    if own is not None and own < OPPOSED:
        action = f"the reward falls where {accuracy} rises: correct the sign of its weight (rewards.components)"
        return finding(RunVerdict.FAULT, measured, numbers, action)
    pairs = [name for name, value in numbers.items() if "/" in name and value < CONFLICT]
    if own is not None and own < SOME and len(numbers) > 1:
        action = f"other components outweigh {accuracy}: change the weights in rewards.components"
        return finding(RunVerdict.WARNING, measured, numbers, action)
    if pairs:
        action = f"{pairs[0]} oppose each other: change their weights in rewards.components, or gate one by the other"
        return finding(RunVerdict.NOTICE, measured, numbers, action)
    return finding(RunVerdict.OK, measured, numbers)


@check("reward_and_length", Needs.STEPS, SYMPTOMS)
def check_length(material: Material) -> RunFinding:
    """Checks that the reward does not follow the length of the response."""
    values = dict(_columns(material)).get(LENGTH, [])
    if not values:
        return unmeasured("lengths or rewards did not vary within a group")
    correlation, length = mean(values), material.trend("response_length")
    numbers = {"correlation": correlation}
    measured = f"correlation of reward and length within groups: {correlation:+.2f}"
    if length is not None:
        numbers |= {"length_first": length.first, "length_last": length.last}
        measured += f"; mean length {length.first:.4g} to {length.last:.4g} tokens"
    return finding(_verdict_of(correlation, length), measured, numbers, SHAPED if correlation > SOME else "")


def _verdict_of(correlation: float, length: Trend | None) -> RunVerdict:
    grows = length is not None and length.rises
    if correlation >= MUCH or (correlation >= SOME and grows):
        return RunVerdict.WARNING
    shrinks = length is not None and length.falls and length.last < length.first / 2
    if correlation >= SOME or (correlation <= -SOME and shrinks):
        return RunVerdict.NOTICE
    return RunVerdict.OK


def _columns(material: Material) -> Iterator[tuple[str, list[float]]]:
    names = dict.fromkeys(name for step in material.steps for name in step.correlations)
    for name in names:
        yield name, [step.correlations[name] for step in material.steps if name in step.correlations]


@check("reward_noise", Needs.ANSWERS)
def check_noise(material: Material) -> RunFinding:
    """Compares the rewards of equal responses to one prompt, and the reward with properties of the response.

    Equal siblings have equal rewards if the reward is a function of prompt and response. An environment's episodes are
    left out: their rewards depend on more than the policy's text.
    """
    groups = [group for group in material.answers if any(answer.text for answer in group.answers)]
    pairs = [(group.sample_id, a, b) for group in groups for a, b in combinations(_scored(group), 2)]
    same = [pair for pair in pairs if _are_equal(*pair[1:])]
    noisy = [pair for pair in same if pair[1].reward != pair[2].reward]
    rows = [row for group in groups for row in _centred(group)]
    if material.config.environment.is_on or (len(same) < MIN_PAIRS and len(rows) < MIN_RESPONSES):
        return unmeasured("the drawn answers are episodes, have no text, or are too few that repeat or differ")
    num_other, z = len(pairs) - len(same), _largest_correlation(np.array(rows)) if rows else 0.0
    of_same = len(noisy) / max(1, len(same))
    of_other = (sum(a.reward != b.reward for _, a, b in pairs) - len(noisy)) / max(1, num_other)
    numbers = {"equal_disagree": of_same, "different_disagree": of_other, "largest_z": z, "num_pairs": float(len(same))}
    measured = (
        f"rewards differ in {of_same:.1%} of {len(same)} pairs of equal responses to one prompt and in {of_other:.1%} "
        f"of {num_other} pairs of different ones; the largest correlation of the reward with length, repetition, "
        f"digits, truncation or the label is {z:.1f} standard errors"
    )
    if len(same) >= MIN_PAIRS and of_same > RARELY * max(of_other, RARELY):
        verdict = RunVerdict.FAULT if of_same >= SAME * of_other else RunVerdict.WARNING
        shown = [f"{name}: {a.text!r} has the rewards {a.reward} and {b.reward}" for name, a, b in noisy[:NUM_SHOWN]]
        return finding(verdict, measured, numbers, RANDOM, tuple(map(Evidence, shown)), SYMPTOMS)
    trend = material.trend(MetricName.REWARD_MEAN)
    is_unrelated = len(rows) >= MIN_RESPONSES and z < SURE and len(material.steps) >= MIN_STEPS
    if is_unrelated and trend is not None and not trend.rises:
        return finding(RunVerdict.WARNING, measured, numbers, UNRELATED, (), SYMPTOMS)
    return finding(RunVerdict.OK, measured, numbers)


def _scored(group: AnswerGroup) -> list[KeptAnswer]:
    return [answer for answer in group.answers if answer.reward is not None]


def _are_equal(a: KeptAnswer, b: KeptAnswer) -> bool:
    whole = len(a.text) < MAX_ANSWER_CHARACTERS  # longer texts are cut
    return whole and (a.text, a.num_tokens, a.finish_reason) == (b.text, b.num_tokens, b.finish_reason)


def _largest_correlation(rows: np.ndarray) -> float:
    """Returns the largest correlation of the first column with another one, in standard errors. `rows` is [N, K]."""
    products, norms = np.abs(rows[:, 0] @ rows[:, 1:]), np.sqrt(np.square(rows).sum(axis=0))
    return float((products / np.maximum(norms[0] * norms[1:], TINY)).max() * math.sqrt(len(rows)))


def _centred(group: AnswerGroup) -> np.ndarray:
    """Returns reward and properties of each sibling, less their means over the group; none if the rewards are equal."""
    rows = np.array([_properties(answer, group.references) for answer in _scored(group)])
    return rows - rows.mean(axis=0) if len(rows) and np.ptp(rows[:, 0]) > 0 else rows[:0]


def _properties(answer: KeptAnswer, references: Sequence[str]) -> list[float]:
    text, labels = answer.text, [reference.strip().casefold() for reference in references]
    is_label = any(short_answer(text, are_numbers) in labels for are_numbers in (False, True))
    contains = any(label and label in text.casefold() for label in labels)
    digits = sum(map(str.isdigit, text)) / max(1, len(text))
    ended = answer.finish_reason not in ("length", "truncated")
    return [answer.reward or 0.0, answer.num_tokens, len(text), answer.repetition, digits, is_label, contains, ended]


LEAST_FALL = 0.1  # of its first value, for a component without a weight

EXPLOITATION_ACTION = (
    "read late samples; correct the reward, raise algorithm.kl.coef, go back to an earlier checkpoint, or stop earlier"
)


@check("reward_exploitation", Needs.STEPS)
def check_exploitation(material: Material) -> RunFinding:
    """Compares the trend of the reward with those of components without a weight and of held-out accuracy."""
    reward = material.trend(MetricName.REWARD_MEAN)
    if reward is None:
        return unmeasured("too few steps for a trend")
    numbers, falling = {"reward_z": reward.z}, []
    parts = [f"reward {reward.first:.3g} to {reward.last:.3g} ({reward.z:+.1f} standard errors)"]
    for name in unweighted(material.config):
        trend = Trend.of(material.component(name))
        if trend is not None:
            numbers[f"{name}_z"] = trend.z
            parts.append(f"{name} (weight 0) {trend.first:.3g} to {trend.last:.3g} ({trend.z:+.1f})")
            falling += [name] if trend.falls and trend.first - trend.last >= LEAST_FALL * abs(trend.first) else []
    pair = BeforeAfter.of(material.run.evaluations if material.run else ())
    before, after = pair.before, pair.after
    parts += [f"held-out accuracies are not compared: {pair.reason}"] if pair.reason else []
    if before is not None and after is not None:
        numbers |= {"held_out_before": before.accuracy, "held_out_after": after.accuracy}
        parts.append(f"held-out accuracy {before.accuracy:.3f} to {after.accuracy:.3f}")
        falling += ["held-out accuracy"] if after.high < before.low else []
    events = material.run.guard if material.run else ()
    numbers["num_guard_events"] = float(len(events))
    if events:
        parts.append(f"the guard acted {len(events)} times, first after step {events[0].version} ({events[0].sign})")
        evidence = tuple(Evidence(event.text) for event in events[:NUM_SHOWN])
        return finding(RunVerdict.FAULT, "; ".join(parts), numbers, EXPLOITATION_ACTION, evidence)
    measured = "; ".join(parts)
    if reward.rises and falling:
        measured += f": {', '.join(falling)} falls while the reward rises"
        return finding(RunVerdict.FAULT, measured, numbers, EXPLOITATION_ACTION)
    return finding(RunVerdict.OK, measured, numbers)


def unweighted(config: RunConfig) -> list[str]:
    """Names of the components that count in no recipe."""
    weights = [config.rewards.weights_in(recipe) for recipe in config.rewards.active_recipes.values()]
    return [c.name for c in config.rewards.components if all(each.get(c.name, 0.0) == 0 for each in weights)]


MOST, MANY = 0.9, 0.6

TOO_EASY = (
    "prompts are too easy: use harder rows, leave out what is solved (algorithm.drop_uniform_groups=true), or raise "
    "sampler.temperature"
)

TOO_HARD = (
    "prompts are too hard, or the reward does not recognise right answers: check findings on the parser and on labels "
    "first, then use easier rows (data.curriculum), a warm start, or more algorithm.samples_per_prompt"
)

EQUAL = "the reward is constant within a group: check rewards.components and `mobula score`"


@check("uniform_groups", Needs.STEPS)
def check_groups(material: Material) -> RunFinding:
    """Share of groups with equal rewards, early and late, and which of them are right and wrong."""
    early, late = (look(MetricName.UNIFORM_FRACTION) for look in (material.early, material.late))
    if early is None or late is None:
        return unmeasured("no step has the share of uniform groups")
    right = material.late(MetricName.UNIFORM_RIGHT_FRACTION)
    wrong = material.late(MetricName.UNIFORM_WRONG_FRACTION)
    numbers = {"uniform_early": early, "uniform_late": late}
    measured = f"{early:.1%} of the early and {late:.1%} of the late groups have equal rewards"
    if right is not None and wrong is not None:
        numbers |= {"right_late": right, "wrong_late": wrong}
        measured += f" (late: {right:.1%} right, {wrong:.1%} wrong)"
    if late < MANY:
        verdict = RunVerdict.OK
    elif early >= MOST and late >= MOST:
        verdict = RunVerdict.FAULT
    else:  # solved groups are uniform
        verdict = RunVerdict.NOTICE if material.is_learning else RunVerdict.WARNING
    return finding(verdict, measured, numbers, _action_groups(material, right, wrong), _by_difficulty(material))


def _action_groups(material: Material, right: float | None, wrong: float | None) -> str:
    highest = material.series(MetricName.REWARD_MAX)
    lowest = material.series(MetricName.REWARD_MIN)
    if highest and max(highest) == min(lowest):
        return EQUAL
    if right is None or wrong is None:
        return f"{TOO_HARD}; or {TOO_EASY}"
    return TOO_EASY if right >= wrong else TOO_HARD


def _by_difficulty(material: Material) -> tuple[Evidence, ...]:
    component = material.config.rewards.accuracy_component
    shares = []
    for group in material.answers:
        marks = [answer.components[component] for answer in group.answers if component in answer.components]
        if marks:
            shares.append(sum(marks) / len(marks))
    if not shares:
        return ()
    bins = Counter("none" if s <= 0 else "all" if s >= 1 else "under half" if s < 0.5 else "over half" for s in shares)
    names = ("none", "under half", "over half", "all")
    text = ", ".join(f"{name} {bins[name]}" for name in names)
    return (Evidence(f"drawn groups by the share of right siblings: {text}"),)


PARSER_ACTION = (
    "ask for the form that the reward reads (data.prompt_suffix, data.system_prompt), or let the reward read the form "
    "that the policy writes (rewards.components.N.options.extract)"
)

FAILURE_ACTION = "read the first failure in run.log; rewards.on_failure=stop ends the run at it"
# Beginnings of reasons of answers that were found and are wrong.
COMPARISONS = ("another value", "too far from every reference", "over budget", "the choice is taken back")


@check("reward_parser", Needs.STEPS, NOTHING_TO_COMPARE)
def check_parser(material: Material) -> RunFinding:
    """Share of the responses of the last quarter for which the component of accuracy found no answer."""
    component = material.config.rewards.accuracy_component
    late = material.steps[-max(1, len(material.steps) // 4) :]
    num = int(sum(step.values[MetricName.NUM_SAMPLES] for step in late))
    if num == 0:
        return unmeasured("no response was trained")
    prefix = f"{component}: "
    reasons = Counter(
        {
            reason.removeprefix(prefix): count
            for reason, count in material.late_count(CounterName.REWARD_REASONS).items()
            if reason.startswith(prefix) and not reason.removeprefix(prefix).startswith(COMPARISONS)
        }
    )
    failed = sum(material.late_count(CounterName.REWARD_FAILURES).values())
    share, failed_share = reasons.total() / num, failed / (num + failed)
    numbers = {"unparsed_fraction": share, "failed_fraction": failed_share, "num_responses": float(num)}
    shown = "".join(f"; {reason!r} {count}" for reason, count in reasons.most_common(NUM_SHOWN) if count)
    measured = (
        f"{component} found no answer in {share:.1%} of the newest {num} trained responses{shown}; "
        f"{failed_share:.1%} could not be scored"
    )
    verdict = by_share(max(share, failed_share), fault=0.9, warning=0.3, notice=0.05)
    action = PARSER_ACTION if share >= failed_share else FAILURE_ACTION
    unread = [answer for answer in reversed(material.kept_answers) if component in answer.reasons][:NUM_SHOWN]
    evidence = tuple(Evidence(f"{answer.reasons[component]}: {answer.text!r}") for answer in unread)
    return finding(verdict, measured, numbers, action, evidence)


FALLS = (
    "the policy unlearns what is rewarded: check the sign of advantages and loss (algorithm.advantage, algorithm.loss "
    "and rewards of your own), that rewards belong to their responses, and learner.learning_rate"
)


@check("reward_trend", Needs.STEPS)
def check_trend(material: Material) -> RunFinding:
    """Compares the mean reward of the first and the last quarter of the steps."""
    trend = material.trend(MetricName.REWARD_MEAN)
    if trend is None:
        num = len(material.steps)
        return unmeasured(f"{num} of {MIN_POINTS} steps that a trend needs are finished")
    measured = (
        f"the mean reward goes from {trend.first:.3g} (first quarter) to {trend.last:.3g} (last quarter of {trend.num} "
        f"steps), {trend.z:+.1f} standard errors"
    )
    numbers = {"first": trend.first, "last": trend.last, "z": trend.z}
    if trend.rises or material.is_solved:
        return finding(RunVerdict.OK, measured, numbers)
    if trend.falls:
        # What a falling reward leaves behind is no cause of it.
        followed = tuple(name for name in SYMPTOMS if name != "reward_trend")
        return finding(RunVerdict.WARNING, measured, numbers, FALLS, (), followed)
    action = "see the other findings; the first ones are the most likely causes"
    return finding(RunVerdict.NOTICE, measured, numbers, action)


MIN_PROMPTS = 40
FEW = 0.02  # of the answers are labels
OFTEN = 0.5
LABELS_NUM_SHOWN = 5
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@check("answers_and_labels", Needs.ANSWERS)
def check_labels(material: Material) -> RunFinding:
    """Compares the answers of the later half of the drawn groups with their labels, and both distributions."""
    groups = material.answers[len(material.answers) // 2 :]
    pairs = [(group.references[0], [answer.text for answer in group.answers]) for group in groups if group.references]
    labels = [label.strip().casefold() for label, _ in pairs]
    if len(labels) < MIN_PROMPTS or not any(text for _, texts in pairs for text in texts):
        return unmeasured(f"{len(labels)} of {MIN_PROMPTS} drawn prompts that it needs have a label and text")
    are_numbers = all(_NUMBER.fullmatch(label) for label in labels)
    answers = [[short_answer(text, are_numbers) for text in texts] for _, texts in pairs]
    agreement = Agreement.of(list(zip(labels, answers, strict=True)))
    if agreement is None:
        return unmeasured("the drawn prompts have one label")
    flat = Counter(answer for given in answers for answer in given)
    known = sum(num for answer, num in flat.items() if answer in set(labels)) / flat.total()
    numbers = {
        "agreement": agreement.observed,
        "by_chance": agreement.expected,
        "kappa": agreement.kappa,
        "error": agreement.error,
        "answers_in_labels": known,
    }
    measured = (
        f"{agreement.observed:.1%} of the late drawn answers equal their label, {agreement.expected:.1%} would by "
        f"chance (kappa {agreement.kappa:.2f} ± {agreement.error:.2f}, {agreement.num_prompts} prompts); {known:.1%} "
        "equal any label"
    )
    verdict, action = _verdict(material, agreement, known)
    evidence = (Evidence(f"labels: {_most(Counter(labels))}"), Evidence(f"answers: {_most(flat)}"))
    return finding(verdict, measured, numbers, action, () if verdict is RunVerdict.OK else evidence)


def _verdict(material: Material, agreement: Agreement, known: float) -> tuple[RunVerdict, str]:
    is_chance = agreement.kappa < 2 * agreement.error and known >= OFTEN and len(material.steps) >= MIN_STEPS
    if material.is_solved and is_chance:
        return RunVerdict.WARNING, (
            "the accuracy is high, and answers do not depend on the labels: check what rewards.accuracy_component reads"
        )
    if material.is_solved:
        return RunVerdict.OK, ""
    if known <= FEW and len(material.steps) >= MIN_STEPS:
        return RunVerdict.WARNING, (
            "hardly an answer is a label: check the column of the answer (data.columns.answer), and the form that the "
            "prompt asks for"
        )
    if is_chance:
        return RunVerdict.FAULT, (
            "answers do not depend on the labels: check that labels belong to their rows (`mobula data inspect`), that "
            "pictures belong to their questions and show something, and policy.freeze"
        )
    return RunVerdict.OK, ""


def short_answer(text: str, is_number: bool) -> str:
    """Returns the last number of a text if labels are numbers, else its last line, in lower case."""
    if is_number:
        numbers = _NUMBER.findall(text)
        return numbers[-1] if numbers else text.strip().casefold()
    return text.strip().rpartition("\n")[2].strip().casefold()


def _most(counts: Counter[str]) -> str:
    return ", ".join(f"{name[:40]!r} {num / counts.total():.0%}" for name, num in counts.most_common(LABELS_NUM_SHOWN))


LANGUAGE_SOME, LANGUAGE_MANY = 0.05, 0.15  # rise of the share of letters outside the most frequent script
MIN_ANSWERS = 32
LANGUAGE_NUM_SHOWN = 3

ACTION = (
    "the policy mixes languages: raise algorithm.kl.coef, add a component of the reward for the language, or let the "
    "guard act (guard.signs)"
)


@check("language_mix", Needs.ANSWERS)
def check_language(material: Material) -> RunFinding:
    """Share of letters outside a response's most frequent script, of early and late drawn responses with letters."""
    answers = [answer for answer in material.kept_answers if any(map(str.isalpha, answer.text))]
    if len(answers) < MIN_ANSWERS:
        return unmeasured(f"{len(answers)} of {MIN_ANSWERS} drawn responses that it needs have letters")
    size = len(answers) // 4
    early, late = (mean([script_mix(answer.text) for answer in part]) for part in (answers[:size], answers[-size:]))
    numbers = {"mix_early": early, "mix_late": late, "num_responses": float(len(answers))}
    measured = (
        f"{early:.1%} of the letters of early and {late:.1%} of those of late responses are outside the most frequent "
        f"script of their response ({len(answers)} drawn responses with letters)"
    )
    rise = late - early
    if rise < LANGUAGE_SOME:
        return finding(RunVerdict.OK, measured, numbers)
    verdict = RunVerdict.WARNING if rise >= LANGUAGE_MANY else RunVerdict.NOTICE
    worst = sorted(answers[-size:], key=lambda answer: -script_mix(answer.text))[:LANGUAGE_NUM_SHOWN]
    return finding(verdict, measured, numbers, ACTION, tuple(Evidence(repr(a.text)) for a in worst))


TRUNCATION_NUM_SHOWN = 2
CUT = ("length", "truncated")


@check("truncation", Needs.STEPS, ("end_of_text", "reward_parser", *NOTHING_TO_COMPARE))
def check_truncation(material: Material) -> RunFinding:
    """Share of responses that were cut at `sampler.max_tokens`."""
    late = material.late(MetricName.TRUNCATED_FRACTION)
    length = material.late(MetricName.RESPONSE_LENGTH)
    if late is None or length is None:
        return unmeasured("no step has the share of truncated responses")
    limit = material.config.sampler.max_tokens
    measured = (
        f"{late:.1%} of the late responses were cut at sampler.max_tokens={limit}; mean length {length:.4g} tokens"
    )
    verdict = by_share(late, fault=0.9, warning=0.3, notice=0.1)
    action = f"raise sampler.max_tokens above {limit}, or ask for shorter answers"
    cut = [answer for answer in reversed(material.kept_answers) if answer.finish_reason in CUT]
    evidence = tuple(
        Evidence(f"cut after {answer.num_tokens} tokens: {answer.text!r}") for answer in cut[:TRUNCATION_NUM_SHOWN]
    )
    numbers = {"truncated_fraction": late, "response_length": length}
    return finding(verdict, measured, numbers, action, evidence if verdict is not RunVerdict.OK else ())


@check("end_of_text", Needs.ANSWERS)
def check_end_of_text(material: Material) -> RunFinding:
    """Whether the policy ever samples the end of a response."""
    answers = material.kept_answers
    num_ended = sum(answer.finish_reason not in CUT for answer in answers)
    numbers = {"num_ended": float(num_ended), "num_responses": float(len(answers))}
    measured = f"{num_ended} of {len(answers)} drawn responses end by themselves"
    if num_ended:
        return finding(RunVerdict.OK, measured, numbers)
    action = (
        "the policy never samples an end of text: check eos_token_id in the generation_config.json of policy.model, "
        "the chat template, sampler.stop_strings, and raise sampler.max_tokens"
    )
    return finding(RunVerdict.FAULT, measured, numbers, action, (Evidence(repr(answers[-1].text)),))


ALL, VARIETY_MOST = 0.97, 0.8
FAR, LOST = 0.2, 0.5  # difference of accuracies; share of the greedy accuracy that sampling loses

OTHER_ROWS = (
    "greedy answers to held-out rows are right far less often than sampled ones to training rows: compare labels and "
    "form of the two splits (`mobula data inspect`), and the limits of evaluation with those of sampler"
)

MIN_GROUPS = 8


@check("variety", Needs.ANSWERS, ("entropy", "uniform_groups"))
def check_variety(material: Material) -> RunFinding:
    """Share of drawn groups whose responses are equal, early and late."""
    groups = [group for group in material.answers if len(group.answers) > 1]
    if len(groups) < MIN_GROUPS or not any(answer.text for group in groups for answer in group.answers):
        return unmeasured(f"{len(groups)} of {MIN_GROUPS} drawn groups that it needs have text")
    size = max(4, len(groups) // 4)
    early, late = (mean([float(_is_equal(group)) for group in part]) for part in (groups[:size], groups[-size:]))
    repeated = mean([answer.repetition for group in groups[-size:] for answer in group.answers])
    numbers = {"equal_early": early, "equal_late": late, "repetition_late": repeated}
    measured = (
        f"all siblings are equal in {early:.1%} of the early and {late:.1%} of the late drawn groups; {repeated:.1%} "
        "of the word 4-grams of late responses are repetitions"
    )
    temperature = material.config.sampler.temperature
    action = f"raise sampler.temperature above {temperature:g}; add algorithm.entropy.bonus, or use algorithm=dapo"
    if early >= ALL and late >= ALL:
        return finding(RunVerdict.FAULT, measured, numbers, action, _shown(groups[0]))
    if late >= VARIETY_MOST and not material.is_learning:
        return finding(RunVerdict.WARNING, measured, numbers, action, _shown(groups[-1]))
    return finding(RunVerdict.NOTICE if late >= ALL else RunVerdict.OK, measured, numbers)


def _is_equal(group: AnswerGroup) -> bool:
    return len({(answer.text, answer.num_tokens) for answer in group.answers}) == 1


def _shown(group: AnswerGroup) -> tuple[Evidence, ...]:
    return (Evidence(f"{len(group.answers)} siblings of {group.sample_id}: {group.answers[0].text!r}"),)


@check("greedy_and_sampled", Needs.STEPS)
def check_sampling(material: Material) -> RunFinding:
    """Compares the greedy accuracy of a version on held-out rows with that of its sampled responses."""
    config = material.config
    steps = {record.step: record.accuracy for record in material.steps}
    pairs = [
        (evaluation.accuracy, sampled)
        for evaluation in (material.run.evaluations if material.run else ())
        if float(evaluation.identity.get("temperature", config.evaluation.temperature)) == 0
        and (sampled := steps.get(evaluation.version + 1)) is not None
    ]
    if not pairs or config.sampler.is_flow:
        return unmeasured("no version has a greedy evaluation (evaluation.temperature=0) and a step")
    greedy, sampled = mean([pair[0] for pair in pairs]), mean([pair[1] for pair in pairs])
    temperature = config.sampler.temperature
    numbers = {"greedy": greedy, "sampled": sampled, "temperature": temperature}
    measured = (
        f"{greedy:.1%} of the greedy held-out answers and {sampled:.1%} of those that the same weights sampled for "
        f"training are right (sampler.temperature={temperature:g}, {len(pairs)} versions)"
    )
    if greedy - sampled >= FAR and sampled <= LOST * greedy:
        action = f"lower sampler.temperature={temperature:g} (1 is usual), or set sampler.top_p below 1"
        verdict = RunVerdict.FAULT if sampled <= LOST * LOST * greedy else RunVerdict.WARNING
        return finding(verdict, measured, numbers, action, (), SYMPTOMS)
    if sampled - greedy >= FAR and greedy <= LOST * sampled:
        return finding(RunVerdict.WARNING, measured, numbers, OTHER_ROWS, (), ("reward_exploitation",))
    return finding(RunVerdict.OK, measured, numbers)
