"""The media store: one copy a content, a byte budget, and readers that fetch a medium once."""

import time
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest

from mobula.cluster.records import media as media_module
from mobula.cluster.records.media import MediaHandle, MediaReader, MediaStore, ProcessedMedia, content_key


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


def test_stored_bytes_grow_with_unique_media_not_with_uses() -> None:
    store = in_process_store()
    for key in ("a", "b", "a", "a"):
        store.get_or_add(key, key, image)
    assert (store.num_bytes, store.num_bytes_unique) == (200, 200)


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
    reader = MediaReader(timeout_s=1, max_items=8)
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


def test_reader_returns_more_media_than_it_keeps() -> None:
    reader = MediaReader(timeout_s=1, max_items=1)
    read = reader.read([handle_of(image(value=i), str(i)) for i in range(4)])
    assert [m.inputs["pixel_values"][0] for m in read] == [0, 1, 2, 3]


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
