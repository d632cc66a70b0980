"""Asynchrony: steps/h of simulated long-tailed runs at several bounds on staleness, beside no waiting at all.

The run's own loop, dispatcher, gate, order and buffer in virtual time: figures do not depend on the machine, and
overrides of a run's configuration have no bearing. Staleness 0 is synchronous on the same machines, each side with its
own; a synchronous run that shares them all between both sides idles less, so a speed-up over that one is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, rates
from benchmarks.simulation.simulated_run import Outcome, Workload, simulate
from mobula.deploy.rehearsal.simulated.machine import LognormalLengths

MAX_STALENESS = (0, 1, 2, 4, 8)
ASYNC = 4  # the bound that the targets are for
SPEED_UP = 2.5
OF_IDEAL = 0.9
RESPONSES_IN_FLIGHT_A_SLOT = 5
WARMUP_STEPS = 12
UNIT = "steps/h"

MEAN_TOKENS = 6600.0  # before the cut
NUM_SIBLINGS = 16
LENGTHS = LognormalLengths(median=MEAN_TOKENS / math.exp(0.5), sigma=1.0, max_tokens=32768, seed=0)
WORKLOAD = Workload(
    # Reasoning as it is published: a limit of 32k tokens that some percent of the responses reach, a mean of a fifth of
    # it, 16 siblings. A step's responses fill all slots twice; the learner has four fifths of the engines' work.
    lengths=LENGTHS,
    num_siblings=NUM_SIBLINGS,
    num_engines=32,
    slots_per_engine=32,
    tokens_per_s=50.0,
    prompts_per_step=128,
    update_s=190.0,
    push_s=10.0,
    reference_s=10.0,
    reward_s=1.0,
    num_steps=0,  # the effort's
    num_warmup_steps=WARMUP_STEPS,
)
SIGMAS = (0.0, 0.5, 1.0, 1.5)
BALANCES = (0.25, 1.0, 1.6)  # learner's work over the engines'
IN_FLIGHT = (3, 4, 5, 10)  # responses a slot


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Every bound on the main workload, one seed a repeat; then the bound of the targets with other limits on groups in
    flight, and in other regimes.
    """
    workload = replace(WORKLOAD, num_steps=effort.num_steps + 2 * WARMUP_STEPS)
    loads = [_with(workload, seed=seed) for seed in range(effort.repeats)]
    series = {
        "ideal": Measurements("no waiting at all, computed", UNIT, tuple(3600 / load.ideal_step_s for load in loads))
    }
    for bound in MAX_STALENESS:
        series |= _series(f"staleness_{bound}", f"max_staleness={bound}", [_simulate(load, bound) for load in loads])
    for responses in IN_FLIGHT:
        what = f"max_staleness={ASYNC}, {_num_groups(workload, responses)} groups in flight"
        outcomes = [_simulate(load, ASYNC, responses) for load in loads[:1]]
        series |= _series(f"in_flight_{_num_groups(workload, responses)}", what, outcomes)
    settings = {
        **asdict(workload),
        "max_concurrent_groups": _num_groups(workload, RESPONSES_IN_FLIGHT_A_SLOT),
        "response_tokens": _quantiles(workload.lengths),
        "decoding_s_of_a_step": workload.decoding_s,
    }
    return Findings(settings, series, (*_claims(series), *_regimes(workload)))


def _simulate(workload: Workload, bound: int, responses: int = RESPONSES_IN_FLIGHT_A_SLOT) -> Outcome:
    return simulate(workload, max_staleness=bound, max_concurrent=_num_groups(workload, responses))


def _num_groups(workload: Workload, responses: int) -> int:
    """The limit on groups in flight that gives each slot so many responses."""
    return responses * workload.num_slots // workload.num_siblings


def in_regime(workload: Workload, *, sigma: float, balance: float) -> Workload:
    """The same mean length with another tail, and a learner with `balance` times the engines' work."""
    changed = _with(workload, sigma=sigma, median=MEAN_TOKENS / math.exp(sigma**2 / 2))
    return replace(changed, update_s=balance * changed.decoding_s - changed.push_s)


def _with(workload: Workload, **lengths: float) -> Workload:
    return replace(workload, lengths=replace(workload.lengths, **lengths))


def _series(name: str, what: str, outcomes: Sequence[Outcome]) -> dict[str, Measurements]:
    found = {
        "": (what, UNIT, [3600 / outcome.step_s for outcome in outcomes]),
        "_engines_idle": ("share of slot-seconds without decoding", "share", [o.engine_idle_share for o in outcomes]),
        "_learner_idle": ("neither update nor push", "share", [o.learner_idle_share for o in outcomes]),
        "_mean_age": ("trained tokens' mean age", "versions", [o.mean_age for o in outcomes]),
        "_max_age": ("oldest trained token", "versions", [float(o.max_age) for o in outcomes]),
        "_length": ("trained responses' mean length", "tokens", [o.mean_tokens for o in outcomes]),
    }
    return {name + suffix: Measurements(text, unit, tuple(values)) for suffix, (text, unit, values) in found.items()}


def _claims(series: Mapping[str, Measurements]) -> list[Claim]:
    claims = []
    for bound in MAX_STALENESS[1:]:
        ours = series[f"staleness_{bound}"]
        targets = (SPEED_UP, OF_IDEAL) if bound == ASYNC else (None, None)
        claims.append(Claim(f"staleness {bound} / staleness 0", rates(ours, series["staleness_0"]), targets[0]))
        claims.append(Claim(f"staleness {bound} / ideal", rates(ours, series["ideal"]), targets[1]))
    oldest = max(max(series[f"staleness_{bound}_max_age"].values) / bound for bound in MAX_STALENESS[1:])
    return [*claims, Claim("oldest trained token / its bound", oldest, 1.0, at_least=False)]


def _regimes(workload: Workload) -> list[Claim]:
    """Regimes with less gain: short tails, and a learner or engines that are the bottleneck by far."""
    claims = []
    for sigma in SIGMAS:
        for balance in BALANCES:
            load = in_regime(workload, sigma=sigma, balance=balance)
            claims += _compare(f"sigma {sigma:g}, learner {balance:g} of engines", load)
    one_wave = replace(workload, slots_per_engine=2 * workload.slots_per_engine, update_s=workload.update_s / 2)
    claims += _compare("one wave of responses a step", one_wave)
    return claims


def _compare(name: str, load: Workload) -> list[Claim]:
    sync, ours = (_simulate(load, bound) for bound in (0, ASYNC))
    return [
        Claim(f"{name}: staleness {ASYNC} / 0", sync.step_s / ours.step_s),
        Claim(f"{name}: staleness {ASYNC} / ideal", load.ideal_step_s / ours.step_s),
    ]


def _quantiles(lengths: LognormalLengths, num_prompts: int = 1000) -> dict[str, float]:
    tokens = sorted(n for index in range(num_prompts) for n in lengths.of(str(index), NUM_SIBLINGS).tolist())
    found = {f"p{percent}": tokens[len(tokens) * percent // 100] for percent in (50, 90, 99)}
    return {**found, "mean": sum(tokens) / len(tokens), "cut": tokens.count(lengths.max_tokens) / len(tokens)}
