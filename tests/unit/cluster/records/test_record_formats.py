"""Records on their way and on disk: Arrow, JSON lines, denoising steps, partial responses."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fakes import make_group, make_prompt
from group_data import assert_equal, image_prompt
from latent_data import SIGMAS, assert_same_actions, latent_actions, latent_group, latent_prompt, sampled

from mobula.actors.rollout.actor import MediaBatcher, RolloutActor
from mobula.cluster.records.actions import LatentActions, TokenActions
from mobula.cluster.records.arrow import SCHEMA, from_batch, record_batch, to_batch, to_rows
from mobula.cluster.records.json_lines import line_positions, parse_json, read_lines
from mobula.cluster.records.media import MediaReader, ProcessedMedia
from mobula.cluster.records.partial_response import NOTHING, Attempt, SampledSequence
from mobula.cluster.records.trajectory import FinishReason, Prompt, Reward, WeightSpan
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequests

REWARDS = (Reward(0.75, {"accuracy": 1.0, "format": 0.5}, {"accuracy": "7 = 7"}), None)


def test_a_group_comes_back_as_it_was() -> None:
    group = make_group(image_prompt(), versions=(3, 3, 4, 5))
    back = from_batch(to_batch(group, REWARDS))
    assert_equal(back.group, group)
    assert (back.rewards, back.reference_logprobs) == (REWARDS, None)


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
    ("text", "value"),
    [("NaN", None), ('{"a": NaN}', {"a": None}), ("-Infinity", -math.inf), ("1" + "0" * 30, 10**30)],
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
        assert (back.rewards, back.group.prompt.media, back.group.prompt.media_spans) == (
            rewards,
            PROMPT.media,
            PROMPT.media_spans,
        )
        for ours, theirs in zip(back.group.trajectories, group.trajectories, strict=True):
            assert_same_actions(ours.actions, theirs.actions)
            np.testing.assert_array_equal(ours.behavior_logprobs, theirs.behavior_logprobs)


class Denoiser:
    """A sampler that returns the same two siblings for every prompt, whole."""

    def coming(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def sample(self, prompt: Prompt, media: Sequence[ProcessedMedia], *others: Any) -> list[SampledSequence]:
        assert [medium.modality for medium in media] == ["condition", "condition"]
        return [sampled(latent_actions(0)), sampled(latent_actions(1))]


class Actor(RolloutActor):
    """A rollout actor around a `Denoiser`, without a tokenizer."""

    def __init__(self) -> None:
        self._sampler, self._tokenizer = Denoiser(), None
        self._media = MediaBatcher(MediaReader(timeout_s=1, max_items=2))


async def test_a_rollout_actor_makes_a_group_of_denoising_steps_with_images_and_no_text() -> None:
    settings = SamplingSettings(num_samples=2, temperature=1.0, max_tokens=3, seed=0)
    attempt = InFlightRequests(chunk_tokens=4).of(PROMPT, settings).next_attempt()
    group, (summary, responses) = await Actor().generate(PROMPT, settings, attempt)
    assert [t.response.images for t in group.trajectories] == [(b"png",)] * 2
    assert [t.response.text for t in group.trajectories] == ["", ""]
    assert_same_actions(group.trajectories[1].actions, latent_actions(1))
    assert (summary.num_tokens, responses) == (6, None)  # images do not travel with a message


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
