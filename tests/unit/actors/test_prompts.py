"""The order of prompts, what happens to unusable rows, resuming, and the check before training."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobula.actors.datasets.mixture import epoch_order
from mobula.actors.datasets.prompts import InDriver, PromptSource, fixed_prompts, preflight
from mobula.actors.datasets.rows import Row, Skipped, Split, count_by_reason
from mobula.cluster.errors import DatasetError, MediaError, PromptError
from mobula.cluster.records.trajectory import Prompt


class FakeProcessor:
    """Prompts without a model: as long as their question; rows named in `bad_media` or `bad_text` are unusable."""

    def __init__(self, bad_media: Collection[str] = (), bad_text: Collection[str] = ()) -> None:
        self.bad_media = bad_media
        self.bad_text = bad_text

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        ids = np.arange(self.check(row), dtype=np.int32)
        return Prompt(prompt_id, row.sample_id, row.question, ids, ids, references=row.references)

    def check(self, row: Row) -> int:
        if row.sample_id in self.bad_media:
            raise MediaError(f"{row.sample_id} is corrupt")
        if row.sample_id in self.bad_text:
            raise PromptError(f"{row.sample_id} is too long")
        return len(row.question)


def rows(num: int) -> tuple[Row, ...]:
    return tuple(Row(f"r{i}", "q" * (i + 1), str(i), str(i)) for i in range(num))


def source(num_rows: int, *, seed: int = 0, processor: FakeProcessor | None = None) -> PromptSource:
    return PromptSource(rows(num_rows), InDriver(processor or FakeProcessor()), seed=seed, split_name="train")


def ids(stream: PromptSource, num: int) -> list[str]:
    return [stream.next().prompt_id for _ in range(num)]


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    stream = source(20)
    epochs = [[stream.next().sample_id for _ in range(20)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(row.sample_id for row in rows(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_fingerprint_is_of_the_rows_that_are_used() -> None:
    def fingerprint(split: tuple[Row, ...], *unusable: str) -> str:
        checked = Split("train", split, ())
        processor = FakeProcessor(bad_text=unusable)
        return preflight(checked, processor, max_skipped_fraction=1.0, max_checked_rows=0).fingerprint

    assert fingerprint(rows(5)) == fingerprint(rows(5))
    numbered = tuple(replace(row, sample_id=f"{row.sample_id}-1") for row in rows(5))
    found = [fingerprint(rows(5)), fingerprint(rows(4)), fingerprint(rows(5), "r1"), fingerprint(rows(5), "r2")]
    assert len({*found, fingerprint(numbered)}) == 5
    assert found[2].startswith("4 of 5, ")


def test_prompt_ids_are_of_epoch_position_and_sample() -> None:
    stream = source(3)
    prompts = [stream.next() for _ in range(4)]
    assert [p.prompt_id for p in prompts[::3]] == [f"0/0/{prompts[0].sample_id}", f"1/0/{prompts[3].sample_id}"]


@given(st.integers(1, 30), st.integers(-(2**40), 2**40), st.integers(0, 90))
def test_the_order_is_a_pure_function_of_seed_and_index(num_rows: int, seed: int, index: int) -> None:
    walked, asked = source(num_rows, seed=seed), source(num_rows, seed=seed)
    assert ids(walked, index + 1)[-1] == asked.prompt_at(index).prompt_id


def test_another_seed_gives_another_order() -> None:
    assert epoch_order(50, 0, 0).tolist() != epoch_order(50, 1, 0).tolist()
    assert epoch_order(50, 0, 0).tolist() != epoch_order(50, 0, 1).tolist()


@given(st.integers(1, 12), st.integers(0, 40), st.data())
def test_a_resumed_source_gives_the_pending_prompts_first_and_loses_none(
    num_rows: int, handed_out: int, data: st.DataObject
) -> None:
    first = source(num_rows)
    given_out = ids(first, handed_out)
    in_flight = [i for i in given_out if data.draw(st.booleans())]
    resumed = source(num_rows)
    resumed.restore(cursor=first.cursor, pending=in_flight)
    assert resumed.pending == tuple(in_flight)
    assert ids(resumed, len(in_flight) + 5) == in_flight + ids(first, 5)
    assert resumed.pending == ()


def test_pending_prompts_survive_a_second_resume() -> None:
    first = source(5)
    given_out = ids(first, 4)
    second = source(5)
    second.restore(first.cursor, given_out)
    again = second.next().prompt_id
    third = source(5)
    third.restore(second.cursor, [again, *second.pending])
    assert ids(third, 4) == given_out


@pytest.mark.parametrize("num_rows", [4, 6])
def test_resuming_with_other_rows_is_refused(num_rows: int) -> None:
    given_out = ids(source(5), 5)
    with pytest.raises(DatasetError, match="data.path"):
        source(num_rows).restore(cursor=5, pending=given_out)


def test_unusable_rows_are_skipped_counted_and_named_once() -> None:
    stream = source(5, processor=FakeProcessor(bad_media={"r1"}, bad_text={"r3"}))
    seen = [stream.next().sample_id for _ in range(9)]
    assert set(seen) == {"r0", "r2", "r4"}
    assert count_by_reason(stream.skipped) == {"bad_media": 1, "bad_prompt": 1}
    assert {(s.sample, s.detail) for s in stream.skipped} == {("r1", "r1 is corrupt"), ("r3", "r3 is too long")}


def test_a_source_without_usable_rows_stops() -> None:
    stream = source(5, processor=FakeProcessor(bad_media={row.sample_id for row in rows(5)}))
    with pytest.raises(DatasetError, match="no row of the split train is usable .*corrupt"):
        stream.next()


def test_the_listener_receives_each_unusable_row_even_if_there_is_no_other() -> None:
    reported: list[Skipped] = []
    bad = FakeProcessor(bad_media={row.sample_id for row in rows(3)})
    stream = PromptSource(rows(3), InDriver(bad), seed=0, split_name="train", on_skipped=reported.append)
    for _ in range(2):
        with pytest.raises(DatasetError):
            stream.next()
    assert sorted(skipped.sample for skipped in reported) == ["r0", "r1", "r2"]


def test_a_source_without_rows_is_refused() -> None:
    with pytest.raises(DatasetError, match="data.path"):
        source(0)


def test_fixed_prompts_are_the_first_usable_ones_in_file_order() -> None:
    split = Split("validation", rows(6), ())
    held_out = fixed_prompts(split, InDriver(FakeProcessor(bad_media={"r1"})), 3)
    assert [p.prompt_id for p in held_out.prompts] == ["validation/0/r0", "validation/2/r2", "validation/3/r3"]
    assert held_out.skipped == (Skipped("r1", "bad_media", "r1 is corrupt"),)


def test_a_held_out_split_without_usable_rows_is_an_error() -> None:
    with pytest.raises(DatasetError, match="validation"):
        fixed_prompts(Split("validation", rows(1), ()), InDriver(FakeProcessor(bad_text={"r0"})), 1)


def test_preflight_keeps_the_usable_rows_and_names_the_others() -> None:
    unread = Skipped("train.jsonl:3", "broken_json", "the line is not JSON")
    split = Split("train", rows(4), (unread,))
    report = preflight(split, FakeProcessor(bad_text={"r3"}), max_skipped_fraction=0.4, max_checked_rows=0)
    assert report.rows == rows(4)[:3]
    assert report.skipped == (unread, Skipped("r3", "bad_prompt", "r3 is too long"))
    assert (report.num_skipped, report.longest_prompt_tokens) == ({"broken_json": 1, "bad_prompt": 1}, 3)


def test_preflight_refuses_a_split_with_too_many_unusable_rows() -> None:
    processor = FakeProcessor(bad_media={"r0", "r1"})
    with pytest.raises(DatasetError, match=r"2 of 4 .*r0: r0 is corrupt.*data.max_skipped_fraction is 0.4"):
        preflight(Split("train", rows(4), ()), processor, max_skipped_fraction=0.4, max_checked_rows=0)


def test_preflight_refuses_a_split_without_usable_rows_whatever_is_allowed() -> None:
    with pytest.raises(DatasetError, match="1 of 1"):
        preflight(
            Split("train", rows(1), ()), FakeProcessor(bad_media={"r0"}), max_skipped_fraction=1.0, max_checked_rows=0
        )
