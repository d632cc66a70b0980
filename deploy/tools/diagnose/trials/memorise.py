"""Whether updates on one recorded group make its best response likely."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.registry import not_measured
from mobula.deploy.tools.diagnose.trials.recorded import TrialGroup, TrialLearner, response_logprob

NAME = "memorise_one_prompt"
NUM_CANDIDATES = 8
NUM_UPDATES = 16
ENOUGH = 0.1  # nat a token


async def memorise(learner: TrialLearner, groups: Sequence[TrialGroup]) -> RunFinding:
    """Trains `NUM_UPDATES` steps on one group: of the first whose rewards differ, the one with the least likely best
    response.
    """
    mixed = [group for group in groups if not group.is_uniform][:NUM_CANDIDATES]
    if not mixed:
        return not_measured(NAME, f"the rewards of each of {len(groups)} recorded groups are equal")
    logprobs = [await response_logprob(learner, group.prompt, group.trajectories[group.best]) for group in mixed]
    before, chosen = min(zip(logprobs, mixed, strict=True), key=lambda pair: pair[0])
    best = chosen.trajectories[chosen.best]
    if before > -ENOUGH:
        return not_measured(
            NAME,
            f"the best response of each of {len(mixed)} recorded groups is likely: at least {math.exp(before):.1%}",
        )
    for _ in range(NUM_UPDATES):
        await learner.update([chosen.scored])
    after = await response_logprob(learner, chosen.prompt, best)
    gain = after - before
    numbers = {"before": before, "after": after, "gain": gain}
    measured = (
        f"{NUM_UPDATES} updates on one group change the log-prob of its best response from {before:.3g} to {after:.3g} "
        f"nat a token (probability {math.exp(before):.1%} to {math.exp(after):.1%})"
    )
    evidence = (Evidence(f"{chosen.prompt.sample_id}: {best.response.text[-200:]!r}"),)
    if gain >= ENOUGH or after > -ENOUGH:
        return RunFinding(NAME, RunVerdict.OK, measured, numbers, "", evidence)
    if gain < -ENOUGH:
        action = "updates make the best response less likely: check the sign of the loss and learner.learning_rate"
        return RunFinding(NAME, RunVerdict.FAULT, measured, numbers, action, evidence)
    action = "raise learner.learning_rate; check policy.freeze, algorithm.kl.coef and the loss"
    return RunFinding(NAME, RunVerdict.WARNING, measured, numbers, action, evidence)
