"""Whether responses mix scripts more and more."""

from __future__ import annotations

from mobula.cluster.guard.observation import script_mix
from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material, mean
from mobula.deploy.tools.diagnose.records.registry import not_measured

NAME = "language_mix"
SOME, MANY = 0.05, 0.15  # rise of the share of letters outside the most frequent script
MIN_ANSWERS = 32
NUM_SHOWN = 3
ACTION = (
    "the policy mixes languages: raise algorithm.kl.coef, add a component of the reward for the language, or let the "
    "guard act (guard.signs)"
)


def check_language(material: Material) -> RunFinding:
    """Share of letters outside a response's most frequent script, of early and late drawn responses with letters."""
    answers = [answer for answer in material.kept_answers if any(map(str.isalpha, answer.text))]
    if len(answers) < MIN_ANSWERS:
        return not_measured(NAME, f"{len(answers)} of {MIN_ANSWERS} drawn responses that it needs have letters")
    size = len(answers) // 4
    early, late = (mean([script_mix(answer.text) for answer in part]) for part in (answers[:size], answers[-size:]))
    numbers = {"mix_early": early, "mix_late": late, "num_responses": float(len(answers))}
    measured = (
        f"{early:.1%} of the letters of early and {late:.1%} of those of late responses are outside the most frequent "
        f"script of their response ({len(answers)} drawn responses with letters)"
    )
    rise = late - early
    if rise < SOME:
        return RunFinding(NAME, RunVerdict.OK, measured, numbers)
    verdict = RunVerdict.WARNING if rise >= MANY else RunVerdict.NOTICE
    worst = sorted(answers[-size:], key=lambda answer: -script_mix(answer.text))[:NUM_SHOWN]
    return RunFinding(NAME, verdict, measured, numbers, ACTION, tuple(Evidence(repr(a.text)) for a in worst))
