"""Statistics of an evaluation with several responses to a prompt: pass@k, intervals over prompts, reflection."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

NUM_RESAMPLES = 1000
Z_95 = 1.959964  # two-sided 95 % quantile of the normal distribution


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """Returns the 95 % score interval of a share of `num` independent trials (Wilson 1927).

        (share + z^2 / 2n  -+  z * sqrt(share * (1 - share) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    It stays within [0, 1] and has a width even at 0 and 1. For a mean of values within [0, 1] it is conservative.
    """
    z2 = Z_95 * Z_95
    centre = share + z2 / (2 * num)
    half = Z_95 * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    scale = 1 + z2 / num
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def interval_of_mean(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of independent `values` [N]: Wilson's if all are in [0, 1], else a
    bootstrap."""
    if all(0 <= value <= 1 for value in values):
        return wilson_interval(math.fsum(values) / len(values), len(values))
    return bootstrap_interval(values, seed)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the unbiased estimate of the probability that one of `k` responses is correct (Chen et al. 2021,
    arXiv:2107.03374).

        1 - C(n - c, k) / C(n, k)    for c correct responses of n >= k

    Raises:
        ValueError: `k` is not in [1, num_samples], or `num_correct` is larger than `num_samples`.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} responses is not defined")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ks(num_samples: int) -> list[int]:
    """Returns the k of the reported pass@k: powers of two below `num_samples`, and `num_samples`."""
    return [*(2**i for i in range(num_samples.bit_length()) if 2**i < num_samples), num_samples]


def bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Returns the 95 % percentile bootstrap interval (Efron 1979) of the mean of `values` [N], one per prompt or seed.
    It is deterministic; a single value gives an interval of width 0.
    """
    samples = np.asarray(values, dtype=np.float64)  # [N]
    random = np.random.default_rng(seed)
    means = samples[random.integers(0, samples.size, size=(NUM_RESAMPLES, samples.size))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of `values` [N], one per prompt, and its standard error std / sqrt(N) with N - 1 degrees of
    freedom; 0 for a single value."""
    samples = np.asarray(values, dtype=np.float64)
    if samples.size < 2:
        return float(samples.mean()), 0.0
    return float(samples.mean()), float(samples.std(ddof=1) / math.sqrt(samples.size))


def paired_gains(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Returns the gain of each component between two evaluations of the same prompts with the same seeds.

    Arguments map prompt -> component -> mean over the responses. The result has `NAME_mean` and its standard error
    `NAME_se` of `after`, and `NAME_gain` and `NAME_gain_se` of the differences by prompt, from which the difficulty of
    prompts cancels. Components that some prompt of `after` lacks are left out.
    """
    gains: dict[str, float] = {}
    names = set.intersection(*({*components} for components in after.values())) if after else set()
    for name in sorted(names):
        gains[f"{name}_mean"], gains[f"{name}_se"] = mean_and_error([after[prompt][name] for prompt in after])
        both = [p for p in after if name in before.get(p, {})]
        if both:
            gain, error = mean_and_error([after[p][name] - before[p][name] for p in both])
            gains |= {f"{name}_gain": gain, f"{name}_gain_se": error}
    return gains


def reflection_ratios(correct: Sequence[bool], reflects: Sequence[bool]) -> dict[str, float]:
    """Returns how often responses reflect, and how often reflecting responses are correct (MAYE, arXiv:2504.02587).

    `correct` and `reflects` are [N], in the same order. A ratio over no response is 0.
    """
    both = sum(c and r for c, r in zip(correct, reflects, strict=True))
    num, num_correct, num_reflecting = len(correct), sum(correct), sum(reflects)
    return {
        "reflection_ratio": _ratio(num_reflecting, num),
        "reflection_ratio_in_correct": _ratio(both, num_correct),
        "reflection_ratio_in_incorrect": _ratio(num_reflecting - both, num - num_correct),
        "correct_ratio": _ratio(num_correct, num),
        "correct_ratio_in_reflection": _ratio(both, num_reflecting),
        "correct_ratio_in_no_reflection": _ratio(num_correct - both, num - num_reflecting),
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
