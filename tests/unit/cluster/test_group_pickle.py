"""How groups travel between processes: whole, and as few arrays."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
from group_data import assert_equal, image_prompt

from mobula.cluster.records.actions import MAX_BYTES_PACKED, KeptSets, TokenActions
from mobula.cluster.records.arrow import from_batch, to_batch
from mobula.cluster.records.media import MediaHandle
from mobula.cluster.records.trajectory import (
    MAX_CHARACTERS_BY_VALUE,
    Answers,
    FinishReason,
    Generated,
    MediaSpan,
    Prompt,
    Response,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)


def group(*lengths: int) -> TrajectoryGroup:
    return TrajectoryGroup(image_prompt(), tuple(trajectory(i, length) for i, length in enumerate(lengths)))


def trajectory(sibling: int, length: int) -> Trajectory:
    """One that differs from its siblings in everything, its last half sampled by newer weights and not trained on."""
    half = length // 2
    spans = (WeightSpan(sibling, 0, half), WeightSpan(sibling + 1, half, length))
    return Trajectory(
        trajectory_id=f"0/1/cat#{sibling}",
        actions=TokenActions(np.arange(length, dtype=np.int32) + 100 * sibling),
        behavior_logprobs=-np.arange(length, dtype=np.float32) - sibling,
        action_mask=np.arange(length) < half,
        weight_spans=tuple(span for span in spans if span.start < span.end),
        finish_reason=FinishReason.STOP if sibling % 2 else FinishReason.LENGTH,
        response=Response(f"answer {sibling}", length, is_truncated=sibling % 2 == 0, images=(b"png",) * sibling),
    )


@pytest.mark.parametrize("lengths", [(), (5,), (0,), (3, 0, 7), (2, 2, 2, 2)], ids=str)
def test_a_group_arrives_as_it_left(lengths: tuple[int, ...]) -> None:
    left = group(*lengths)
    buffers: list[pickle.PickleBuffer] = []
    arrived = pickle.loads(pickle.dumps(left, protocol=5, buffer_callback=buffers.append), buffers=buffers)
    assert_equal(arrived, left)


@pytest.mark.parametrize("num_kept", [3, MAX_BYTES_PACKED // 8], ids=["packed", "as they are"])
def test_kept_sets_arrive_as_they_left(num_kept: int) -> None:
    def with_sets(one: Trajectory) -> Trajectory:
        counts = np.full(one.num_steps, num_kept, dtype=np.int32)
        kept = KeptSets(counts, np.arange(counts.sum(), dtype=np.int32) + len(one.trajectory_id))
        return replace(one, actions=replace(one.actions, kept=kept))

    left = TrajectoryGroup(image_prompt(), tuple(map(with_sets, group(2, 1, 3).trajectories)))
    arrived = pickle.loads(pickle.dumps(left, protocol=5))
    for before, after in zip(left.trajectories, arrived.trajectories, strict=True):
        np.testing.assert_array_equal(after.actions.token_ids, before.actions.token_ids)
        np.testing.assert_array_equal(after.actions.kept.counts, before.actions.kept.counts)
        np.testing.assert_array_equal(after.actions.kept.ids, before.actions.kept.ids)
    assert arrived.summary() == left.summary()
    recorded = from_batch(to_batch(left, [None] * 3)).group.trajectories
    for before, after in zip(left.trajectories, recorded, strict=True):
        np.testing.assert_array_equal(after.actions.kept.counts, before.actions.kept.counts)
        np.testing.assert_array_equal(after.actions.kept.ids, before.actions.kept.ids)


def test_siblings_share_their_arrays_on_the_way() -> None:
    def num_buffers(num_siblings: int) -> int:
        buffers: list[pickle.PickleBuffer] = []
        pickle.dumps(group(*[4] * num_siblings), protocol=5, buffer_callback=buffers.append)
        return len(buffers)

    assert num_buffers(16) == num_buffers(1)


def test_long_responses_are_not_copied_on_the_way() -> None:
    num_tokens = (
        MAX_BYTES_PACKED // 2
    )  # of each of four: their masks, of a byte a token, are too long for one array too
    left = group(*[num_tokens] * 4)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(left, protocol=5, buffer_callback=buffers.append)
    sent = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    for own in left.trajectories:
        for array in (own.actions.token_ids, own.behavior_logprobs, own.action_mask):
            assert sum(np.shares_memory(array, travelling) for travelling in sent) == 1
    assert_equal(pickle.loads(data, buffers=buffers), left)


def test_ids_of_another_width_arrive_as_the_same_ids() -> None:
    left = replace(image_prompt(), compact_ids=np.array([5, 99, 6]), expanded_ids=np.array([5, 99, 99, 6]))
    arrived = pickle.loads(pickle.dumps(left, protocol=5))
    assert (arrived.compact_ids.tolist(), arrived.expanded_ids.tolist()) == ([5, 99, 6], [5, 99, 99, 6])


def test_no_field_stays_behind() -> None:
    """Who adds a field to one of these records adds it to how they travel."""
    left = group(4)
    prompt = left.prompt.__reduce__()[1]
    _, _, actions, logprobs, masks, [sibling] = left.__reduce__()[1]
    trajectory_id, [first, _], finish_reason, response = sibling
    trajectory = (trajectory_id, actions, logprobs, masks, first, finish_reason, response)
    [handle], [placed] = prompt[5], prompt[6]
    travelling = {Prompt: prompt, MediaHandle: handle, MediaSpan: placed, Trajectory: trajectory}
    travelling |= {WeightSpan: first, Response: response.__reduce__()[1]}
    for record, values in travelling.items():
        assert len(values) == len(fields(record)), record


def test_responses_are_sent_beside_their_group_where_they_are_few_bytes() -> None:
    def generated(*texts: str, images: tuple[bytes, ...] = ()) -> Generated:
        responses = [Response(text, 4, is_truncated=False, images=images) for text in texts]
        siblings = zip(responses, group(*[4] * len(texts)).trajectories, strict=True)
        sampled = TrajectoryGroup(image_prompt(), tuple(replace(t, response=response) for response, t in siblings))
        return Generated.of(sampled.prompt, "a reference", (sampled.summary(), sampled.small_responses()))

    half = "x" * (MAX_CHARACTERS_BY_VALUE // 2)
    answers = generated(half, half).to_score
    assert [response.text for response in answers.responses] == [half, half]
    assert answers.trajectory_ids == tuple(f"{image_prompt().prompt_id}#{i}" for i in (0, 1))
    assert generated(half, half + "x").to_score == "a reference"
    assert generated("a", images=(b"png",)).to_score == "a reference"


def test_answers_travel_without_what_no_reward_function_reads() -> None:
    answers = Answers(image_prompt(), (1,), (Response("a", 1, is_truncated=False),))
    prompt = answers.prompt
    for with_media in (False, True):
        lean = answers.lean(with_media=with_media)
        assert lean.responses == answers.responses
        assert (lean.prompt.compact_ids.size, lean.prompt.expanded_ids.size) == (0, 0)
        assert lean.prompt.media == (prompt.media if with_media else ())
        kept = ("prompt_id", "sample_id", "text", "references", "metadata")
        assert all(getattr(lean.prompt, name) == getattr(prompt, name) for name in kept)
