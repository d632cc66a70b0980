"""Records: content and digest of groups, media, and their forms in pickles, Arrow and JSON."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import pickle
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fakes import make_group, make_prompt
from flow_run import SIGMAS, assert_same_actions, latent_actions, latent_group, latent_prompt, sampled
from group_data import assert_equal, image_prompt

from mobula.cluster.records import media as media_module
from mobula.cluster.records.actions import MAX_BYTES_PACKED, KeptSets, LatentActions, TokenActions
from mobula.cluster.records.arrow import SCHEMA, from_batch, record_batch, to_batch, to_rows
from mobula.cluster.records.json_lines import line_positions, parse_json, read_lines
from mobula.cluster.records.media import MediaHandle, MediaReader, MediaStore, ProcessedMedia, content_key
from mobula.cluster.records.partial_response import NOTHING, Attempt, SampledSequence
from mobula.cluster.records.trajectory import (
    MAX_CHARACTERS_BY_VALUE,
    Answers,
    FinishReason,
    Generated,
    MediaSpan,
    Prompt,
    Response,
    Reward,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
    group_digest,
)
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequests

REWARDS = (Reward(0.75, {"accuracy": 1.0, "format": 0.5}, {"accuracy": "7 = 7"}), None)


def test_an_empty_response_comes_back() -> None:
    group = make_group(make_prompt("0/0/s0"), versions=())
    assert_equal(from_batch(to_batch(group, REWARDS)).group, group)


def test_the_prompt_is_written_once() -> None:
    batch = to_batch(make_group(image_prompt()), REWARDS)
    assert batch.schema == SCHEMA
    assert batch.column("expanded_ids").null_count == batch.num_rows - 1
    assert batch.column("token_ids").null_count == 0


def test_rows_become_the_very_bytes_that_they_become_column_by_column() -> None:
    logprobs = [np.full(3, -0.5, dtype=np.float32)] * 2
    of_group = to_rows(make_group(image_prompt()), REWARDS, logprobs, step=7)
    for rows in ([], of_group, [{"group_id": "0/0/s0", "reference_logprobs": logprobs[0]}]):
        expected = pa.RecordBatch.from_pylist(rows, SCHEMA)
        assert record_batch(rows).schema == SCHEMA
        assert record_batch(rows).serialize() == expected.serialize()


def test_what_was_read_does_not_hold_on_to_the_records_memory() -> None:
    back = from_batch(to_batch(make_group(image_prompt()), REWARDS))
    arrays = [back.group.prompt.expanded_ids, back.group.trajectories[0].actions.token_ids]
    assert all(array.flags.owndata and array.flags.writeable for array in arrays)
    assert arrays[0].dtype == np.int32


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "a\x0bb\x0cc\x1cd", "é"]
    content = "\r\n\r\n".join(json.dumps(text, ensure_ascii=False) for text in texts) + "\r\n \t\n"
    file = tmp_path / "rows.jsonl"
    expected = dict(zip((1, 3, 5, 7, 9), texts, strict=True))
    for mark in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(mark + content.encode())
        assert {number: parse_json(line) for number, line in read_lines(file)} == expected
        for start, length, _ in line_positions(file):
            assert parse_json(file.read_bytes()[start : start + length]) in texts


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_a_file_without_text_has_no_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert list(read_lines(tmp_path / "rows.jsonl")) == []


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        ('{"a": 1}'.encode("utf-16-be"), "no UTF-8"),
        ('{"a": 1}'.encode("utf-32"), "UTF-16"),
        (gzip.compress(b'{"a": 1}', mtime=0), "gzip"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd"),
        (bz2.compress(b'{"a": 1}'), "bzip2"),
        (lzma.compress(b'{"a": 1}'), "xz"),
        (b"PK\x03\x04rows.jsonl", "ZIP"),
        (b"PAR1 and more", "Parquet"),
    ],
)
def test_another_encoding_is_refused_by_name(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=f"rows.jsonl is .*{what}"):
        list(read_lines(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("text", "value"), [("NaN", None), ('{"a": NaN}', {"a": None}), ("-Infinity", -math.inf), ("1" + "0" * 30, 10**30)]
)
def test_nan_is_null(text: str, value: Any) -> None:
    assert parse_json(text.encode()) == value


@pytest.mark.parametrize(
    "number", ["7.50", "1e3", "-0", "0.10", "12345678901234567890123", "1e400", "Infinity", "-Infinity"]
)
def test_numbers_keep_their_spelling(number: str) -> None:
    assert str(parse_json(number.encode())) == number


@pytest.mark.parametrize(
    "text",
    [b"{", b'{"a": 1, "a": 2}', b'[{"b": {"a": 1, "a": 1}}]', b"[" * 100_000, b'"\xff"', b'"\\ud800"', b"9" * 5000]
)  # fmt: skip
def test_what_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": "é"}'.encode("latin-1"), "byte 0xe9 at position 7 is no UTF-8: convert the file"),
        (b'\xef\xbb\xbf{"a": "\x92"}', "byte 0x92 at position 7"),
        (b'{"a": 1}\r{"a": 2}\r\n', "lines end in carriage returns alone"),
        (b'{"a": 1} {"a": 2}', "there is more than one value"),
        (b'{"a": 1},', "there is more than one value"),
        (b'{"a": [1,', "the value does not end"),
        (b"{", "the value does not end"),
    ],
)
def test_the_fault_of_a_line_is_named(text: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_json(text)


PROMPT = latent_prompt("71", negative="")


@pytest.mark.parametrize("cut", range(5))
def test_steps_cut_anywhere_and_joined_are_the_same(cut: int) -> None:
    whole = sampled(latent_actions(0, num_steps=4))
    joined = whole.until(cut).followed_by(whole.since(cut))
    assert_same_actions(joined.actions, whole.actions)
    assert (joined.weight_spans, joined.finish_reason, joined.images) == (whole.weight_spans, "stop", (b"png",))
    assert whole.until(cut).images == ()
    assert_same_actions(NOTHING.followed_by(whole).actions, whole.actions)


def test_steps_without_their_latents_or_outside_of_the_schedule_are_refused() -> None:
    whole = latent_actions(0)
    with pytest.raises(ValueError, match="3 latents, 3 step indices and 3 timesteps"):
        LatentActions(whole.latents[:3], whole.step_index, whole.timesteps, SIGMAS)
    with pytest.raises(ValueError, match=r"steps \[0, 1, 2\] do not lie in a schedule of 2"):
        replace(whole, sigmas=SIGMAS[:3])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_a_group_arrives_as_it_left_and_its_latents_are_not_copied(dtype: type) -> None:
    left = latent_group(PROMPT, [latent_actions(0, dtype=dtype), latent_actions(1, first=1, dtype=dtype)])
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(left, protocol=5, buffer_callback=buffers.append)
    sent = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    for trajectory in left.trajectories:
        assert sum(np.shares_memory(trajectory.actions.latents, array) for array in sent) == 1
    arrived = pickle.loads(data, buffers=buffers)
    for ours, theirs in zip(arrived.trajectories, left.trajectories, strict=True):
        assert_same_actions(ours.actions, theirs.actions)
        assert (ours.response, ours.weight_spans) == (theirs.response, theirs.weight_spans)


def test_the_bytes_of_a_group_are_those_of_its_arrays() -> None:
    actions = latent_actions(0)
    latents, index, times, sigmas, logprobs, mask = 4 * 16 * 4, 3 * 4, 3 * 4, 5 * 4, 3 * 4, 3
    summary = latent_group(PROMPT, [actions, actions]).summary()
    assert summary.num_bytes == 2 * (latents + index + times + sigmas + logprobs + mask)
    assert (summary.num_tokens, summary.num_prompt_tokens, summary.tokens_by_version) == (6, 0, {0: 6})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_a_group_comes_back_from_arrow_as_it_was(dtype: type) -> None:
    group = latent_group(PROMPT, [latent_actions(0, dtype=dtype), latent_actions(1, first=1, dtype=dtype)])
    rewards = (Reward(0.5, {"ocr": 0.5}), None)
    of_journal = to_batch(group, rewards)
    references = [np.zeros(3, dtype=np.float32)] * 2
    for batch in (of_journal, record_batch(to_rows(group, rewards, references, step=3))):
        assert batch.schema == SCHEMA
        back = from_batch(batch)
        prompt = back.group.prompt
        assert (back.rewards, prompt.media, prompt.media_spans) == (rewards, PROMPT.media, PROMPT.media_spans)
        for ours, theirs in zip(back.group.trajectories, group.trajectories, strict=True):
            assert_same_actions(ours.actions, theirs.actions)
            np.testing.assert_array_equal(ours.behavior_logprobs, theirs.behavior_logprobs)


def test_an_attempt_after_a_loss_begins_at_the_noise() -> None:
    settings = SamplingSettings(num_samples=2, temperature=1.0, max_tokens=3, seed=0)
    request = InFlightRequests(chunk_tokens=4).of(PROMPT, settings)
    attempts: list[Attempt] = [request.next_attempt(), request.next_attempt()]
    assert [attempt.siblings for attempt in attempts] == [(), ()]
    assert attempts[0].request_id != attempts[1].request_id


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


GROUP = make_group(image_prompt())


def changed(change: Callable[[Trajectory], dict[str, Any]]) -> TrajectoryGroup:
    first, *others = GROUP.trajectories
    return replace(GROUP, trajectories=(replace(first, **change(first)), *others))


def prompted(**fields: Any) -> TrajectoryGroup:
    return replace(GROUP, prompt=replace(GROUP.prompt, **fields))


def test_a_group_keeps_its_digest_in_messages_and_in_the_journal() -> None:
    rewards = [Reward(1.0)] * len(GROUP.trajectories)
    assert GROUP.summary().sha256 == group_digest(GROUP)
    assert group_digest(pickle.loads(pickle.dumps(GROUP))) == group_digest(GROUP)
    assert group_digest(from_batch(to_batch(GROUP, rewards)).group) == group_digest(GROUP)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(changed(lambda t: {"actions": TokenActions(t.actions.token_ids + 1)}), id="tokens"),
        pytest.param(
            changed(lambda t: {"actions": TokenActions(t.actions.token_ids, KeptSets.uncut(t.num_steps))}), id="kept"
        ),
        pytest.param(changed(lambda t: {"behavior_logprobs": np.nextafter(t.behavior_logprobs, 1)}), id="log-probs"),
        pytest.param(changed(lambda t: {"action_mask": ~t.action_mask}), id="mask"),
        pytest.param(changed(lambda t: {"weight_spans": (WeightSpan(9, 0, t.num_steps),)}), id="versions"),
        pytest.param(changed(lambda t: {"finish_reason": FinishReason.ABORT}), id="reason"),
        pytest.param(prompted(expanded_ids=np.array([5, 98, 99, 6], dtype=np.int32)), id="prompt"),
        pytest.param(prompted(prompt_id="0/4"), id="id"),
        pytest.param(prompted(media_spans=(MediaSpan(0, 2),)), id="place of the image"),
    ],
)
def test_every_field_that_is_trained_counts(other: TrajectoryGroup) -> None:
    assert group_digest(other) != group_digest(GROUP)


def image(num_floats: int = 25, value: float = 0.0) -> ProcessedMedia:
    return ProcessedMedia("image", {"pixel_values": np.full(num_floats, value, dtype=np.float32)})


def in_process_store(max_bytes: int = 10_000) -> MediaStore:
    return MediaStore(put=lambda value: value, max_bytes=max_bytes)


def handle_of(medium: ProcessedMedia, key: str) -> MediaHandle:
    return MediaHandle(key, medium.modality, medium.num_bytes, medium)


def never() -> ProcessedMedia:
    raise AssertionError("a stored medium must not be processed again")


def test_bytes_of_a_medium_are_those_of_its_tensors_and_thumbnail() -> None:
    grid = np.zeros((1, 3), dtype=np.int64)
    pixels = np.zeros((4, 5), dtype=np.float32)
    medium = ProcessedMedia("image", {"pixel_values": pixels, "image_grid_thw": grid}, thumbnail=b"12345")
    assert medium.num_bytes == 80 + 24 + 5


def test_the_key_depends_on_content_and_on_the_processor() -> None:
    assert content_key(b"a", "x") == content_key(b"a", "x")
    assert len({content_key(b"a", "x"), content_key(b"b", "x"), content_key(b"a", "y"), content_key(b"", "xa")}) == 4


def test_an_equal_key_is_stored_and_processed_once() -> None:
    stored: list[Any] = []

    def put(value: Any) -> int:
        stored.append(value)
        return len(stored)

    store = MediaStore(put=put, max_bytes=10_000)
    first = store.get_or_add("k", "a.png", image)
    second = store.get_or_add("k", "copy_of_a.png", never)
    assert first is second
    assert (first.source, first.num_bytes, len(stored)) == ("a.png", 100, 1)
    assert (store.num_bytes, store.num_bytes_unique) == (100, 100)


def test_beyond_the_budget_the_least_recently_used_medium_is_forgotten() -> None:
    store = in_process_store(max_bytes=250)
    for key in ("a", "b", "a", "c"):
        store.get_or_add(key, key, image)
    assert store.num_bytes == 200
    store.get_or_add("a", "a", never)
    store.get_or_add("b", "b", image)
    assert store.num_bytes_unique == 400  # b was forgotten and made again


def test_a_medium_larger_than_the_budget_is_still_handed_out() -> None:
    store = in_process_store(max_bytes=10)
    assert store.get_or_add("a", "a", image).num_bytes == 100
    assert store.get_or_add("b", "b", image).num_bytes == 100
    assert store.num_bytes == 100


def test_a_failed_medium_leaves_nothing_behind() -> None:
    store = in_process_store()
    with pytest.raises(AssertionError):
        store.get_or_add("a", "a", never)
    assert store.num_bytes_unique == 0
    assert store.get_or_add("a", "a", image).key == "a"


def test_reader_returns_media_in_order_with_repeats() -> None:
    media = {key: image(value=ord(key)) for key in "abc"}
    for max_items in (1, 8):  # also more than it keeps
        reader = MediaReader(timeout_s=1, max_items=max_items)
        read = reader.read([handle_of(media[key], key) for key in "cabca"])
        assert [m.inputs["pixel_values"][0] for m in read] == [ord(key) for key in "cabca"]


def test_reader_fetches_each_medium_once_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []

    def fetch(references: list[Any], *, timeout_s: float, what: str) -> list[Any]:
        fetched.extend(references)
        return references

    monkeypatch.setattr(media_module, "fetch", fetch)
    a, b, c = (handle_of(image(value=i), key) for i, key in enumerate("abc"))
    reader = MediaReader(timeout_s=1, max_items=2)
    for handles in ([a, a], [a, b], [c], [b, c]):  # c pushes a out
        reader.read(handles)
    assert len(fetched) == 3
    assert reader.read([a])[0] is a.reference
    assert len(fetched) == 4


def test_reader_reads_at_hand_for_several_and_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = (handle_of(image(value=i), key) for i, key in enumerate("abc"))
    asked: list[Any] = []

    def all_but_b(wanted: list[list[Any]], *, wait_s: float) -> list[list[Any] | None]:
        asked.append([reference for [reference] in wanted])
        return [None if reference is b.reference else [reference] for [reference] in wanted]

    monkeypatch.setattr(media_module, "fetch_at_hand", all_but_b)
    reader = MediaReader(timeout_s=1, max_items=8)
    assert reader.read_at_hand([[a], [b, a], [], [c, a]]) == [[a.reference], None, [], [c.reference, a.reference]]
    assert reader.read_at_hand([[c], [a]]) == [[c.reference], [a.reference]]
    assert asked == [[a.reference, b.reference, c.reference], []]


def test_a_medium_that_another_thread_evicts_meanwhile_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = (handle_of(image(value=i), key) for i, key in enumerate("abc"))
    reader = MediaReader(timeout_s=1, max_items=1)
    reader.read([a])

    def fetch_while_another_reads(references: list[Any], *, timeout_s: float, what: str) -> list[Any]:
        monkeypatch.undo()
        other = Thread(target=reader.read, args=([c],))  # it evicts a
        other.start()
        other.join(10)
        return references

    monkeypatch.setattr(media_module, "fetch", fetch_while_another_reads)
    read = reader.read([a, b])
    assert [m.inputs["pixel_values"][0] for m in read] == [0, 1]


def test_two_threads_that_need_one_medium_process_it_once() -> None:
    num_processed, both = 0, Barrier(2)
    store = MediaStore(lambda media: media, max_bytes=10**9)

    def process() -> ProcessedMedia:
        nonlocal num_processed
        num_processed += 1
        time.sleep(0.05)  # the other thread comes meanwhile
        return image()

    def get() -> None:
        both.wait(10)
        store.get_or_add("a", "a", process)

    threads = [Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert num_processed == 1


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
    assert arrived.summary() == left.summary()
    for other in (arrived, from_batch(to_batch(left, [None] * 3)).group):
        for before, after in zip(left.trajectories, other.trajectories, strict=True):
            np.testing.assert_array_equal(after.actions.token_ids, before.actions.token_ids)
            np.testing.assert_array_equal(after.actions.kept.counts, before.actions.kept.counts)
            np.testing.assert_array_equal(after.actions.kept.ids, before.actions.kept.ids)


def test_siblings_share_their_arrays_on_the_way() -> None:
    def num_buffers(num_siblings: int) -> int:
        buffers: list[pickle.PickleBuffer] = []
        pickle.dumps(group(*[4] * num_siblings), protocol=5, buffer_callback=buffers.append)
        return len(buffers)

    assert num_buffers(16) == num_buffers(1)


def test_long_responses_are_not_copied_on_the_way() -> None:
    left = group(*[MAX_BYTES_PACKED // 2] * 4)  # their masks, of a byte a token, are too long for one array too
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
