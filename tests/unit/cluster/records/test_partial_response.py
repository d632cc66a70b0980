"""Stretches of responses: cut anywhere and put together again they are what they were."""

from __future__ import annotations

import numpy as np
import pytest

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.partial_response import NOTHING, SampledSequence
from mobula.cluster.records.trajectory import FinishReason, WeightSpan


def sequence(versions: str, finish_reason: FinishReason | None = FinishReason.STOP) -> SampledSequence:
    """One token a digit, each sampled by the version that the digit names."""
    spans: list[WeightSpan] = []
    for index, version in enumerate(int(digit) for digit in versions):
        if spans and spans[-1].version == version:
            spans[-1] = WeightSpan(version, spans[-1].start, index + 1)
        else:
            spans.append(WeightSpan(version, index, index + 1))
    ids = np.arange(len(versions), dtype=np.int32)
    return SampledSequence(TokenActions(ids), -ids.astype(np.float32), tuple(spans), finish_reason)


def content(s: SampledSequence) -> tuple:
    return s.actions.token_ids.tolist(), s.logprobs.tolist(), s.weight_spans, s.finish_reason


@pytest.mark.parametrize("versions", ["0", "3333", "0112", "012345"])
def test_a_response_cut_anywhere_and_joined_is_the_same(versions: str) -> None:
    whole = sequence(versions)
    for cut in range(len(versions) + 1):
        assert content(whole.until(cut).followed_by(whole.since(cut))) == content(whole)
        assert not whole.until(cut).is_finished
    assert content(NOTHING.followed_by(whole)) == content(whole)


def test_spans_of_a_stretch_count_from_its_own_first_token() -> None:
    assert sequence("0112").since(2).weight_spans == (WeightSpan(1, 0, 1), WeightSpan(2, 1, 2))


def test_nothing_follows_the_end_of_a_response() -> None:
    with pytest.raises(ValueError, match=r"ended \(stop\) cannot go on: 2 more tokens"):
        sequence("00").followed_by(sequence("11"))


def test_tokens_without_a_logprob_or_a_version_are_refused() -> None:
    ids = np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="3 tokens, 2 log-probs and 3 versioned"):
        SampledSequence(TokenActions(ids), np.zeros(2, dtype=np.float32), (WeightSpan(0, 0, 3),), None)
    with pytest.raises(ValueError, match="3 log-probs and 1 versioned"):
        SampledSequence(TokenActions(ids), np.zeros(3, dtype=np.float32), (WeightSpan(0, 0, 1),), None)
