"""Whether responses end by themselves."""

from __future__ import annotations

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import not_measured

TRUNCATION, END = "truncation", "end_of_text"
MOST, MANY, SOME = 0.9, 0.3, 0.1
NUM_SHOWN = 2
CUT = ("length", "truncated")


def check_truncation(material: Material) -> RunFinding:
    """Share of responses that were cut at `sampler.max_tokens`."""
    late = material.late(MetricName.TRUNCATED_FRACTION)
    length = material.late(MetricName.RESPONSE_LENGTH)
    if late is None or length is None:
        return not_measured(TRUNCATION, "no step has the share of truncated responses")
    limit = material.config.sampler.max_tokens
    measured = (
        f"{late:.1%} of the late responses were cut at sampler.max_tokens={limit}; mean length {length:.4g} tokens"
    )
    verdict = RunVerdict.FAULT if late >= MOST else RunVerdict.WARNING if late >= MANY else RunVerdict.OK
    verdict = RunVerdict.NOTICE if SOME <= late < MANY else verdict
    action = "" if verdict is RunVerdict.OK else f"raise sampler.max_tokens above {limit}, or ask for shorter answers"
    cut = [answer for answer in reversed(material.kept_answers) if answer.finish_reason in CUT]
    evidence = tuple(Evidence(f"cut after {answer.num_tokens} tokens: {answer.text!r}") for answer in cut[:NUM_SHOWN])
    numbers = {"truncated_fraction": late, "response_length": length}
    return RunFinding(TRUNCATION, verdict, measured, numbers, action, evidence if verdict is not RunVerdict.OK else ())


def check_end_of_text(material: Material) -> RunFinding:
    """Whether the policy ever samples the end of a response."""
    answers = material.kept_answers
    num_ended = sum(answer.finish_reason not in CUT for answer in answers)
    numbers = {"num_ended": float(num_ended), "num_responses": float(len(answers))}
    measured = f"{num_ended} of {len(answers)} drawn responses end by themselves"
    if num_ended:
        return RunFinding(END, RunVerdict.OK, measured, numbers)
    action = (
        "the policy never samples an end of text: check eos_token_id in the generation_config.json of policy.model, "
        "the chat template, sampler.stop_strings, and raise sampler.max_tokens"
    )
    return RunFinding(END, RunVerdict.FAULT, measured, numbers, action, (Evidence(repr(answers[-1].text)),))
