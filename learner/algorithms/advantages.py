"""Advantages of responses over a baseline, by the name in `algorithm.advantage`, and statistics of earlier rewards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class EarlierRewards:
    """M rewards of the step's prompts in earlier steps."""

    values: Tensor  # float64 [M], shaped
    prompt_ids: Tensor  # int [M]


@dataclass(frozen=True)
class StepRewards:
    """All N responses of a step. Siblings have equal group ids, wherever they stand.

    Responses that are not included have no reward. Statistics exclude them; their advantage is 0.
    """

    values: Tensor  # float [N], shaped
    included: Tensor  # bool [N]
    group_ids: Tensor  # int [N]
    lengths: Tensor  # int [N], trained tokens
    components: Tensor  # float [N, C], unweighted value of each reward component
    weights: Tensor  # float [N, C], weight of the component in the response's recipe; 0 outside of it
    prompt_ids: Tensor  # int [N]: two groups of a step may have the same prompt
    earlier: EarlierRewards


@dataclass(frozen=True)
class AdvantageOptions:
    """The keys of `algorithm` that some advantage functions depend on."""

    std: str  # "population" or "unbiased"
    pass_k: int
    solved_reward: float


AdvantageFunction = Callable[[StepRewards, AdvantageOptions], Tensor]  # returns advantages [N], one number a response


STD_FLOOR = 1e-4  # added to a standard deviation before dividing by it
POPULATION = "population"  # the variance divides by n; "unbiased" divides by n - 1


class GroupStatistics:
    """Sums over the included members of each group. G groups, N responses."""

    def __init__(self, values: Tensor, included: Tensor, group_ids: Tensor) -> None:
        """`values`, `included` and `group_ids` are [N]."""
        self.included = included
        self.values = torch.where(included, values.double(), 0.0)  # [N]
        ids, self._index = torch.unique(group_ids, return_inverse=True)
        self.num_groups = ids.numel()
        self.counts = self.sum(torch.ones_like(self.values))  # [G]

    @classmethod
    def of(cls, rewards: StepRewards) -> GroupStatistics:
        return cls(rewards.values, rewards.included, rewards.group_ids)

    def sum(self, values: Tensor) -> Tensor:
        """values [N] -> sums over each group's included members [G]."""
        sums = torch.zeros(self.num_groups, dtype=torch.float64, device=values.device)
        return sums.index_add(0, self._index, torch.where(self.included, values, 0.0).double())

    def mean(self) -> Tensor:
        """[G]; 0 for a group without included members."""
        return self.sum(self.values) / self.counts.clamp(min=1)

    def std(self, kind: str) -> Tensor:
        """[G]; 0 for a group of one."""
        return _std(self.sum(self.centred().square()), self.counts, kind)

    def centred(self) -> Tensor:
        """value - mean of the group [N]; exactly 0 in a group of one and where all values are equal."""
        return torch.where(self.per_member(self.is_constant()), 0.0, self.values - self.per_member(self.mean()))

    def is_constant(self) -> Tensor:
        """bool [G]: at most one included member, or equal values, so that there is nothing to compare."""
        start = torch.full((self.num_groups,), torch.inf, dtype=torch.float64, device=self.values.device)
        low = start.scatter_reduce(0, self._index, torch.where(self.included, self.values, torch.inf), "amin")
        high = -start.scatter_reduce(0, self._index, torch.where(self.included, -self.values, torch.inf), "amin")
        return (low == high) | (self.counts == 0)

    def per_member(self, values: Tensor) -> Tensor:
        """values [G] -> [N]."""
        return values[self._index]

    def finish(self, advantages: Tensor) -> Tensor:
        """advantages [N] as float32; 0 for responses that are not included."""
        return torch.where(self.included, advantages, 0.0).float()


def whitened(values: Tensor, included: Tensor, kind: str) -> Tensor:
    """(v - mean) / (std + STD_FLOOR) over the included values, float64; 0 where all of them are equal.

    Args:
        values: any shape.
        included: bool, the same shape. What is not included has no part in the statistics and becomes 0.
    """
    chosen = values[included].double()
    result = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    if chosen.numel() == 0 or chosen.min() == chosen.max():
        return result
    centred = chosen - chosen.mean()
    std = _std(centred.square().sum(), torch.tensor(float(chosen.numel())), kind)
    result[included] = centred / (std + STD_FLOOR)
    return result


def _std(sum_of_squares: Tensor, counts: Tensor, kind: str) -> Tensor:
    freedom = counts if kind == POPULATION else counts - 1
    return (sum_of_squares / freedom.clamp(min=1)).sqrt()


def grpo(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + STD_FLOOR) within the group.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """
    groups = GroupStatistics.of(rewards)
    return groups.finish(groups.centred() / (groups.per_member(groups.std(options.std)) + STD_FLOOR))


def grpo_global_std(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = (r_i - mean(r of the group)) / (std(r of the step) + STD_FLOOR).

    A group whose rewards hardly differ is not blown up to the scale of the others.

    Source: Flow-GRPO, arXiv:2505.05470, and its `global_std`.
    """
    groups = GroupStatistics.of(rewards)
    step = GroupStatistics(rewards.values, rewards.included, torch.zeros_like(rewards.group_ids))
    return groups.finish(groups.centred() / (step.per_member(step.std(options.std)) + STD_FLOOR))


def dr_grpo(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i - mean(r) within the group: GRPO without the bias of dividing by the standard deviation.

    Source: Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.
    """
    groups = GroupStatistics.of(rewards)
    return groups.finish(groups.centred())


def rloo(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i - mean of the others = n / (n - 1) * (r_i - mean(r)); 0 in a group of one.

    Source: Back to Basics, arXiv:2402.14740, section 3.3.
    """
    groups = GroupStatistics.of(rewards)
    scale = groups.counts / (groups.counts - 1).clamp(min=1)
    return groups.finish(groups.centred() * groups.per_member(scale))


def reinforce(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i. Source: Williams, 1992, doi:10.1007/BF00992696."""
    groups = GroupStatistics.of(rewards)
    return groups.finish(groups.values)


def reinforce_batch(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i - mean of all rewards of the step. Source: Williams, 1992, doi:10.1007/BF00992696."""
    step = GroupStatistics(rewards.values, rewards.included, torch.zeros_like(rewards.group_ids))
    return step.finish(step.centred())


def reinforce_pp(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = (r_i - mean) / (std + STD_FLOOR), statistics over all responses of the step.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    return whitened(rewards.values, rewards.included, options.std).float()


def reinforce_pp_baseline(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = c_i / (std(c) + STD_FLOOR) with c_i = r_i - mean of the group, std over all responses of the step.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    return whitened(GroupStatistics.of(rewards).centred(), rewards.included, options.std).float()


def opo(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i - b with b = sum_j L_j r_j / sum_j L_j over the group, L_j the trained tokens of response j.

    b is the baseline of least variance where a gradient's squared norm grows with the length.

    Source: On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.
    """
    groups = GroupStatistics.of(rewards)
    lengths = rewards.lengths.double()
    baseline = groups.sum(lengths * groups.values) / groups.sum(lengths).clamp(min=1)
    has_nothing = groups.per_member(groups.is_constant())
    return groups.finish(torch.where(has_nothing, 0.0, groups.values - groups.per_member(baseline)))


STD_EPSILON = 1e-6
MAX_WEIGHT = 3.0  # of the clip filter


def cpgd(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = w (r_i - mean(r)) within the group, w = 1 / (std(r) + STD_EPSILON).

    Source: CPGD, arXiv:2505.12504 (weight by standard deviation).
    """
    groups = GroupStatistics.of(rewards)
    return groups.finish(groups.centred() / (groups.per_member(groups.std(options.std)) + STD_EPSILON))


def cpgd_clip_filter(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = w (r_i - mean(r)) within the group, w = min(MAX_WEIGHT, groups of the step / groups that differ).

    The weight makes up for the groups of equal rewards, which give no gradient.

    Source: CPGD, arXiv:2505.12504 (clip-filter-like weight).
    """
    groups = GroupStatistics.of(rewards)
    num_differing = (~groups.is_constant()).sum().clamp(min=1)
    return groups.finish(groups.centred() * (groups.num_groups / num_differing).clamp(max=MAX_WEIGHT))


def gdpo(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = whitened over the step(sum_k w_k (r_ik - mean_k) / (std_k + STD_FLOOR)), statistics of k within the group.

    Distinct combinations of components keep distinct advantages, which the sum of raw rewards can merge. Reads
    `components` and `weights`, not `values`.

    Source: GDPO, arXiv:2601.05242.
    """
    total = torch.zeros(rewards.values.shape, dtype=torch.float64)
    for values, weights in zip(rewards.components.T, rewards.weights.T, strict=True):
        group = GroupStatistics(values, rewards.included, rewards.group_ids)
        total = total + weights * group.centred() / (group.per_member(group.std(options.std)) + STD_FLOOR)
    return whitened(total, rewards.included, options.std).float()


def pass_at_k(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """With n siblings of which m are not solved, over all subsets of k siblings (a subset passes if one is solved):

        p = 1 - C(m, k) / C(n, k),  std = sqrt(p (1 - p))
        A_solved = (1 - p) / std,  A_other = (1 - p - C(m - 1, k - 1) / C(n - 1, k - 1)) / std

    0 where every subset passes or none does, and in a group of fewer than k. `algorithm.solved_reward` is the least
    reward of a solved response.

    Source: Pass@k Training, arXiv:2508.10751 (analytical derivation).
    """
    groups = GroupStatistics.of(rewards)
    is_solved = groups.values >= options.solved_reward
    solved = groups.sum(is_solved.double())
    pairs = zip(groups.counts.tolist(), solved.tolist(), strict=True)
    both = torch.tensor([_advantages(int(n), int(n - s), options.pass_k) for n, s in pairs], dtype=torch.float64)
    return groups.finish(torch.where(is_solved, groups.per_member(both[:, 0]), groups.per_member(both[:, 1])))


def _advantages(n: int, m: int, k: int) -> tuple[float, float]:
    """Advantage of a solved response and of another one; `n` siblings, `m` not solved."""
    if n < k or m < k or m == n:
        return 0.0, 0.0
    failed = math.comb(m, k) / math.comb(n, k)
    std = math.sqrt(failed * (1 - failed))
    return failed / std, (failed - math.comb(m - 1, k - 1) / math.comb(n - 1, k - 1)) / std


def prompt_stats(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = (r_i - mean(h)) / (std(h) + STD_FLOOR), h = the rewards of the prompt in this step and in those before it.

    Source: the per-prompt statistics of DDPO, arXiv:2305.13301, and Flow-GRPO, arXiv:2505.05470.
    """
    prompts = _by_prompt(rewards)
    num = len(rewards.values)
    std = prompts.per_member(prompts.std(options.std))[:num]
    return GroupStatistics.of(rewards).finish(prompts.centred()[:num] / (std + STD_FLOOR))


def prompt_stats_global_std(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = (r_i - mean(h)) / (std(r of the step) + STD_FLOOR), h as in `prompt_stats`. Source: the same."""
    centred = _by_prompt(rewards).centred()[: len(rewards.values)]
    step = GroupStatistics(rewards.values, rewards.included, torch.zeros_like(rewards.group_ids))
    return step.finish(centred / (step.per_member(step.std(options.std)) + STD_FLOOR))


def _by_prompt(rewards: StepRewards) -> GroupStatistics:
    """Over the step's responses and, behind them, the earlier rewards of their prompts."""
    earlier = rewards.earlier
    return GroupStatistics(
        torch.cat([rewards.values, earlier.values]),
        torch.cat([rewards.included, torch.ones_like(earlier.prompt_ids, dtype=torch.bool)]),
        torch.cat([rewards.prompt_ids, earlier.prompt_ids]),
    )


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "grpo_global_std": grpo_global_std,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_batch": reinforce_batch,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "opo": opo,
    "cpgd": cpgd,
    "cpgd_clip_filter": cpgd_clip_filter,
    "gdpo": gdpo,
    "pass_at_k": pass_at_k,
    "prompt_stats": prompt_stats,
    "prompt_stats_global_std": prompt_stats_global_std,
}


class PromptHistory:
    """Rewards by prompt of the last `num_steps` steps, under any weights. A prompt is a row of the data.

    A step is one call of `add`. Older rewards are dropped, so the size does not grow with the number of prompts.
    """

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[Mapping[str, list[float]]] = deque(maxlen=num_steps)

    def of(self, prompts: Sequence[str]) -> EarlierRewards:
        """Returns the earlier rewards of a step's prompts; `prompts[k]` has id k."""
        earlier = [
            (value, n) for n, prompt in enumerate(prompts) for step in self._steps for value in step.get(prompt, [])
        ]
        values, ids = zip(*earlier, strict=True) if earlier else ((), ())
        return EarlierRewards(torch.tensor(values, dtype=torch.float64), torch.tensor(ids, dtype=torch.int64))

    def add(self, prompts: Sequence[str], rewards: Sequence[float]) -> None:
        """Adds the rewards of a finished step, one per entry of `prompts`."""
        step: dict[str, list[float]] = {}
        for prompt, reward in zip(prompts, rewards, strict=True):
            step.setdefault(prompt, []).append(reward)
        self._steps.append(step)

    def state(self) -> list[dict[str, list[float]]]:
        """Returns the history as JSON, without loss of precision."""
        return [dict(step) for step in self._steps]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        self._steps.clear()
        self._steps.extend(state)


LEAST_STD = 1e-4  # below it rewards are as good as constant, and dividing by it would only amplify rounding


class RunningMoments:
    """Merges batch after batch, in float64.

    Source: Chan, Golub, LeVeque 1983, doi:10.1080/00031305.1983.10483115.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.sum_of_squares = 0.0  # of deviations from the mean

    @property
    def scale(self) -> float:
        """The standard deviation (n - 1), or 1 while it is not known or below LEAST_STD."""
        if self.count < 2:
            return 1.0
        std = math.sqrt(self.sum_of_squares / (self.count - 1))
        return std if std >= LEAST_STD else 1.0

    def add(self, values: Tensor) -> None:
        """Merge a batch [N]; values that are not finite are left out."""
        chosen = values[values.isfinite()].double()
        num = chosen.numel()
        if num == 0:
            return
        mean = chosen.mean().item()
        squares = (chosen - mean).square().sum().item()
        total = self.count + num
        distance = mean - self.mean
        self.sum_of_squares += squares + distance * distance * self.count * num / total
        self.mean += distance * num / total
        self.count = total

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "sum_of_squares": self.sum_of_squares}

    def load(self, state: dict[str, float]) -> None:
        self.count = int(state["count"])
        self.mean, self.sum_of_squares = state["mean"], state["sum_of_squares"]
