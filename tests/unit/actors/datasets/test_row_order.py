"""The order of prompts: epochs, windows, curricula and mixtures; resuming, and what happens to unusable rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import data_config, write_rows
from hypothesis import given
from hypothesis import strategies as st

from mobula.actors.datasets.mixture import CURRICULA, PERIOD, epoch_order, quotas_of, shares_of, windowed_order
from mobula.actors.datasets.open_split import curriculum_of, open_split
from mobula.actors.datasets.prompts import InDriver, PreflightReport, PromptSource, fixed_prompts, preflight
from mobula.actors.datasets.readers.files import BlockCache
from mobula.actors.datasets.rows import Row, Skipped, Split, count_by_reason
from mobula.cluster.errors import DatasetError, MediaError, PromptError
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.schema.data import CurriculumConfig, DataConfig, DataKind, MixtureConfig, MixtureSource


class FakeProcessor:
    """Prompts without a model: as long as their question; rows named in `bad_media` or `bad_text` are unusable."""

    def __init__(self, bad_media: Collection[str] = (), bad_text: Collection[str] = ()) -> None:
        self.bad_media = bad_media
        self.bad_text = bad_text

    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        ids = np.arange(self.check(row), dtype=np.int32)
        return Prompt(
            prompt_id, row.sample_id, row.question, ids, ids, references=row.references, metadata=row.metadata
        )

    def check(self, row: Row) -> int:
        if row.sample_id in self.bad_media:
            raise MediaError(f"{row.sample_id} is corrupt")
        if row.sample_id in self.bad_text:
            raise PromptError(f"{row.sample_id} is too long")
        return len(row.question)


def checked(config: DataConfig) -> PreflightReport:
    return preflight(
        open_split(config, "train", "label"),
        FakeProcessor(),
        max_skipped_fraction=1.0,
        max_checked_rows=config.max_checked_rows,
        difficulty=found.difficulty if (found := curriculum_of(config)) else None,
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=12), st.integers(1, 200))
def test_a_windowed_order_is_a_permutation_that_reads_few_blocks_at_a_time(
    sizes: list[tuple[int, int]], window_bytes: int
) -> None:
    blocks = np.array(sizes, dtype=np.int64)
    order = windowed_order(blocks, window_bytes, 7, 0)
    assert sorted(order.tolist()) == list(range(int(blocks[:, 0].sum())))
    if blocks[:, 1].sum() <= window_bytes:
        assert order.tolist() == epoch_order(len(order), 7, 0).tolist()
        return
    block_of = np.repeat(np.arange(len(blocks)), blocks[:, 0])[order]
    first, last = {}, {}
    for position, block in enumerate(block_of.tolist()):
        first.setdefault(block, position)
        last[block] = position
    for position in range(len(order)):
        held = [block for block in first if first[block] <= position <= last[block]]
        assert len(held) == 1 or blocks[held, 1].sum() <= window_bytes


def test_epochs_and_seeds_have_windows_of_their_own() -> None:
    blocks = np.array([[10, 10]] * 20)
    orders = [windowed_order(blocks, 40, seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] == windowed_order(blocks, 40, 0, 0).tolist()
    assert len({tuple(order) for order in orders}) == 3


def write_parquet(folder: Path, num: int, group: int) -> None:
    rows = [{"id": str(n), "question": "x" * 500, "answer": str(n)} for n in range(num)]  # small as a dictionary
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=group)


def test_parquet_rows_are_shuffled_over_all_row_groups_and_each_group_is_read_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path, 400, 20)
    read: list[int] = []
    original = pq.ParquetFile.read_row_group

    def counted(self: pq.ParquetFile, group: int, **options: object) -> pa.Table:
        read.append(group)
        return original(self, group, **options)

    size = pq.ParquetFile(tmp_path / "train.parquet").metadata.row_group(0).total_byte_size
    rows = checked(data_config(tmp_path, "parquet", shuffle_bytes=6 * size)).rows
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    drawn = rows.endless(0)
    ids = [drawn.row(index).sample_id for index in range(400)]
    assert sorted(ids, key=int) == [str(n) for n in range(400)]
    assert len(read) == len(set(read)) >= 19, "the check of the rows may have left the last one in memory"
    groups = [int(sample) // 20 for sample in ids[:60]]
    assert len(set(groups)) > 3 and groups != sorted(groups)


def test_a_block_cache_keeps_no_more_than_its_bytes() -> None:
    loaded: list[int] = []

    def load(block: int) -> tuple[str, int]:
        loaded.append(block)
        return f"block {block}", 10

    cache = BlockCache(load, 25)
    assert [cache.get(block) for block in (0, 1, 0, 2, 0, 1)][-1] == "block 1"
    assert loaded == [0, 1, 2, 1]


def levels(folder: Path, num: int = 40) -> None:
    rows = [{"id": str(n), "question": "x" * (num - n), "answer": "1", "level": n % 10} for n in range(num)]
    write_rows(folder, *rows)


def curriculum(kind: str, key: str, num_stages: int = 4, num_epochs: int = 1) -> CurriculumConfig:
    return CurriculumConfig(kind=kind, key=key, num_stages=num_stages, num_epochs=num_epochs)


def test_the_schema_names_every_curriculum() -> None:
    assert CurriculumConfig.model_fields["kind"].annotation.__args__ == ("none", *CURRICULA)


@pytest.mark.parametrize(("kind", "sign"), [("easy_first", 1), ("hard_first", -1)])
@pytest.mark.parametrize("key", ["level", "prompt_tokens"])
def test_a_curriculum_asks_stage_after_stage_and_shuffles_within(
    tmp_path: Path, kind: str, sign: int, key: str
) -> None:
    levels(tmp_path)
    rows = checked(data_config(tmp_path, curriculum=curriculum(kind, key))).rows
    drawn = rows.endless(0)
    epochs = [[drawn.row(index) for index in range(start, start + 40)] for start in (0, 40)]
    difficulty = [row.metadata["level"] if key == "level" else len(row.question) for row in epochs[0]]
    stages = [sorted(difficulty[start : start + 10]) for start in range(0, 40, 10)]
    assert [value for stage in stages[::sign] for value in stage] == sorted(difficulty)
    assert difficulty != sorted(difficulty)[::sign], "rows of a stage are shuffled"
    assert len({row.sample_id for row in epochs[0]}) == 40
    assert [row.sample_id for row in epochs[1]] == [str(n) for n in epoch_order(40, 0, 1)], (
        "the epochs behind are shuffled as a whole"
    )


def test_rows_without_a_difficulty_are_skipped_and_named(tmp_path: Path) -> None:
    levels(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('\n{"id": "last", "question": "?", "answer": "1", "level": "high"}')
    report = checked(data_config(tmp_path, curriculum=curriculum("easy_first", "level")))
    assert [(skipped.sample, skipped.reason) for skipped in report.skipped] == [("last", "bad_difficulty")]
    assert len(report.rows) == 40


def test_a_curriculum_needs_all_rows_checked(tmp_path: Path) -> None:
    levels(tmp_path)
    with pytest.raises(DatasetError, match=r"leaves 30 of the split train unchecked: set data\.max_checked_rows=0"):
        checked(data_config(tmp_path, curriculum=curriculum("easy_first", "level"), max_checked_rows=10))


# The stream of prompts: resuming, unusable rows, held-out prompts, and the check before training.


def numbered(num: int) -> tuple[Row, ...]:
    return tuple(Row(f"r{i}", "q" * (i + 1), str(i), str(i)) for i in range(num))


def stream_of(num_rows: int, *, seed: int = 0, processor: FakeProcessor | None = None) -> PromptSource:
    return PromptSource(numbered(num_rows), InDriver(processor or FakeProcessor()), seed=seed, split_name="train")


def ids(stream: PromptSource, num: int) -> list[str]:
    return [stream.next().prompt_id for _ in range(num)]


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    stream = stream_of(20)
    epochs = [[stream.next().sample_id for _ in range(20)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(row.sample_id for row in numbered(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_fingerprint_is_of_the_rows_that_are_used() -> None:
    def fingerprint(split: tuple[Row, ...], *unusable: str) -> str:
        checked = Split("train", split, ())
        processor = FakeProcessor(bad_text=unusable)
        return preflight(checked, processor, max_skipped_fraction=1.0, max_checked_rows=0).fingerprint

    assert fingerprint(numbered(5)) == fingerprint(numbered(5))
    renamed = tuple(replace(row, sample_id=f"{row.sample_id}-1") for row in numbered(5))
    found = [fingerprint(numbered(num), *bad) for num, *bad in ((5,), (4,), (5, "r1"), (5, "r2"))]
    assert len({*found, fingerprint(renamed)}) == 5
    assert found[2].startswith("4 of 5, ")


def test_prompt_ids_are_of_epoch_position_and_sample() -> None:
    stream = stream_of(3)
    prompts = [stream.next() for _ in range(4)]
    assert [p.prompt_id for p in prompts[::3]] == [f"0/0/{prompts[0].sample_id}", f"1/0/{prompts[3].sample_id}"]


@given(st.integers(1, 30), st.integers(-(2**40), 2**40), st.integers(0, 90))
def test_the_order_is_a_pure_function_of_seed_and_index(num_rows: int, seed: int, index: int) -> None:
    walked, asked = stream_of(num_rows, seed=seed), stream_of(num_rows, seed=seed)
    assert ids(walked, index + 1)[-1] == asked.prompt_at(index).prompt_id


def test_another_seed_gives_another_order() -> None:
    assert epoch_order(50, 0, 0).tolist() != epoch_order(50, 1, 0).tolist()
    assert epoch_order(50, 0, 0).tolist() != epoch_order(50, 0, 1).tolist()


@given(st.integers(1, 12), st.integers(0, 40), st.data())
def test_a_resumed_source_gives_the_pending_prompts_first_and_loses_none(
    num_rows: int, handed_out: int, data: st.DataObject
) -> None:
    first = stream_of(num_rows)
    given_out = ids(first, handed_out)
    in_flight = [i for i in given_out if data.draw(st.booleans())]
    resumed = stream_of(num_rows)
    resumed.restore(cursor=first.cursor, pending=in_flight)
    assert resumed.pending == tuple(in_flight)
    assert ids(resumed, len(in_flight) + 5) == in_flight + ids(first, 5)
    assert resumed.pending == ()


def test_pending_prompts_survive_a_second_resume() -> None:
    first = stream_of(5)
    given_out = ids(first, 4)
    second = stream_of(5)
    second.restore(first.cursor, given_out)
    again = second.next().prompt_id
    third = stream_of(5)
    third.restore(second.cursor, [again, *second.pending])
    assert ids(third, 4) == given_out


@pytest.mark.parametrize("num_rows", [4, 6])
def test_resuming_with_other_rows_is_refused(num_rows: int) -> None:
    given_out = ids(stream_of(5), 5)
    with pytest.raises(DatasetError, match="data.path"):
        stream_of(num_rows).restore(cursor=5, pending=given_out)


def test_unusable_rows_are_skipped_counted_and_named_once() -> None:
    stream = stream_of(5, processor=FakeProcessor(bad_media={"r1"}, bad_text={"r3"}))
    seen = [stream.next().sample_id for _ in range(9)]
    assert set(seen) == {"r0", "r2", "r4"}
    assert count_by_reason(stream.skipped) == {"bad_media": 1, "bad_prompt": 1}
    assert {(s.sample, s.detail) for s in stream.skipped} == {("r1", "r1 is corrupt"), ("r3", "r3 is too long")}


def test_a_source_without_usable_rows_stops() -> None:
    stream = stream_of(5, processor=FakeProcessor(bad_media={row.sample_id for row in numbered(5)}))
    with pytest.raises(DatasetError, match="no row of the split train is usable .*corrupt"):
        stream.next()


def test_the_listener_receives_each_unusable_row_even_if_there_is_no_other() -> None:
    reported: list[Skipped] = []
    bad = FakeProcessor(bad_media={row.sample_id for row in numbered(3)})
    stream = PromptSource(numbered(3), InDriver(bad), seed=0, split_name="train", on_skipped=reported.append)
    for _ in range(2):
        with pytest.raises(DatasetError):
            stream.next()
    assert sorted(skipped.sample for skipped in reported) == ["r0", "r1", "r2"]


def test_a_source_without_rows_is_refused() -> None:
    with pytest.raises(DatasetError, match="data.path"):
        stream_of(0)


def test_fixed_prompts_are_the_first_usable_ones_in_file_order() -> None:
    split = Split("validation", numbered(6), ())
    held_out = fixed_prompts(split, InDriver(FakeProcessor(bad_media={"r1"})), 3)
    assert [p.prompt_id for p in held_out.prompts] == ["validation/0/r0", "validation/2/r2", "validation/3/r3"]
    assert held_out.skipped == (Skipped("r1", "bad_media", "r1 is corrupt"),)


def test_a_held_out_split_without_usable_rows_is_an_error() -> None:
    with pytest.raises(DatasetError, match="validation"):
        fixed_prompts(Split("validation", numbered(1), ()), InDriver(FakeProcessor(bad_text={"r0"})), 1)


def test_preflight_keeps_the_usable_rows_and_names_the_others() -> None:
    unread = Skipped("train.jsonl:3", "broken_json", "the line is not JSON")
    split = Split("train", numbered(4), (unread,))
    report = preflight(split, FakeProcessor(bad_text={"r3"}), max_skipped_fraction=0.4, max_checked_rows=0)
    assert report.rows == numbered(4)[:3]
    assert report.skipped == (unread, Skipped("r3", "bad_prompt", "r3 is too long"))
    assert (report.num_skipped, report.longest_prompt_tokens) == ({"broken_json": 1, "bad_prompt": 1}, 3)


def test_preflight_refuses_a_split_with_too_many_unusable_rows() -> None:
    processor = FakeProcessor(bad_media={"r0", "r1"})
    with pytest.raises(DatasetError, match=r"2 of 4 .*r0: r0 is corrupt.*data.max_skipped_fraction is 0.4"):
        preflight(Split("train", numbered(4), ()), processor, max_skipped_fraction=0.4, max_checked_rows=0)


# Mixtures: exact shares, an order that is a pure function of the index, labels, and what is refused.


def write(folder: Path, name: str, num: int, *more: str) -> None:
    (folder / name).mkdir(parents=True)
    rows = [{"id": str(n), "question": f"{n}?", "answer": str(n), "level": n} for n in range(num)]
    write_rows(folder / name, *rows, *more)


def mixture_source(name: str, weight: float, label: str = "") -> MixtureSource:
    base = data_config(Path(name)).model_dump(include=set(MixtureSource.model_fields))
    return MixtureSource(**(base | {"path": Path(name), "weight": weight, "label": label}))


def mixture(folder: Path, weights: dict[str, float], *, weight_by_rows: bool = False, **changes: Any) -> DataConfig:
    sources = {name: mixture_source(name, weight, f"{name}-label") for name, weight in weights.items()}
    mixed = MixtureConfig(sources=sources, weight_by_rows=weight_by_rows)
    return data_config(folder, kind=DataKind.MIXTURE, mixture=mixed, **changes)


def prompts_of(config: DataConfig, seed: int = 0) -> PromptSource:
    return PromptSource(checked(config).rows, InDriver(FakeProcessor()), seed=seed, split_name="train")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "large", 90)
    write(tmp_path, "small", 10, "{broken")
    return tmp_path


def test_shares_follow_weights_and_temperature() -> None:
    np.testing.assert_allclose(shares_of([1.0, 3.0], 1.0), [0.25, 0.75])
    np.testing.assert_allclose(shares_of([1.0, 16.0], 2.0), [1 / 5, 4 / 5])
    np.testing.assert_allclose(shares_of([1.0, 1e6], 1e9), [0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(shares_of([1e-300, 1e300], 1.0), [0.0, 1.0])


def test_quotas_fill_a_period_exactly() -> None:
    shares = np.array([1 / 3, 1 / 3, 1 / 3])
    assert quotas_of(shares).tolist() == [1366, 1365, 1365]
    assert quotas_of(np.array([1.0])).tolist() == [PERIOD]


def test_each_source_has_its_share_of_every_period(folder: Path) -> None:
    prompts = prompts_of(mixture(folder, {"large": 1.0, "small": 3.0}))
    drawn = [prompts.next().sample_id.split(":")[0] for _ in range(2 * PERIOD)]
    for period in (drawn[:PERIOD], drawn[PERIOD:]):
        assert Counter(period) == {"small": 3072, "large": 1024}
    assert drawn[:PERIOD] != drawn[PERIOD:]
    assert len(set(drawn[:20])) == 2, "sources alternate"


def test_every_row_of_a_source_is_asked_before_one_is_asked_again(folder: Path) -> None:
    prompts = prompts_of(mixture(folder, {"large": 1.0, "small": 1.0}))
    drawn = [prompts.next().sample_id for _ in range(400)]
    small = [sample for sample in drawn if sample.startswith("small:")]
    large = [sample for sample in drawn if sample.startswith("large:")]
    assert all(len(set(small[start : start + 10])) == 10 for start in range(0, len(small) - 10, 10))
    assert len(set(large[:90])) == 90


def test_weights_may_count_rows_and_a_temperature_evens_them(folder: Path) -> None:
    by_rows = mixture(folder, {"large": 1.0, "small": 1.0}, weight_by_rows=True)
    assert open_split(by_rows, "train", "label").rows.shares.tolist() == pytest.approx([90 / 101, 11 / 101])
    warm = by_rows.model_copy(update={"mixture": by_rows.mixture.model_copy(update={"temperature": 2.0})})
    root = np.sqrt([90, 11])
    assert open_split(warm, "train", "label").rows.shares.tolist() == pytest.approx((root / root.sum()).tolist())


def test_a_row_has_the_label_of_its_source(folder: Path) -> None:
    prompts = prompts_of(mixture(folder, {"large": 1.0, "small": 1.0}))
    drawn = [prompts.next() for _ in range(50)]
    assert {(p.sample_id.split(":")[0], p.metadata["label"]) for p in drawn} == {
        ("large", "large-label"),
        ("small", "small-label"),
    }


@pytest.mark.parametrize("max_checked_rows", [0, 5])
def test_a_resumed_mixture_goes_on_at_the_exact_prompt(folder: Path, max_checked_rows: int) -> None:
    config = mixture(folder, {"large": 1.0, "small": 2.0}, max_checked_rows=max_checked_rows)
    first = prompts_of(config, seed=3)
    given = [first.next().prompt_id for _ in range(137)]
    resumed = prompts_of(config, seed=3)
    resumed.restore(first.cursor, given[100:103])
    assert [resumed.next().prompt_id for _ in range(3)] == given[100:103]
    assert [resumed.next().prompt_id for _ in range(200)] == [first.next().prompt_id for _ in range(200)]
    assert resumed.prompt_at(resumed.index_of(given[42])).prompt_id == given[42]


def test_rows_that_were_not_checked_are_skipped_when_they_are_asked(folder: Path) -> None:
    prompts = prompts_of(mixture(folder, {"large": 1.0, "small": 1.0}, max_checked_rows=1))
    drawn = {prompts.next().sample_id for _ in range(250)}
    assert len(drawn) == 100
    [skipped] = prompts.skipped
    assert (skipped.sample, skipped.reason) == ("small:train.jsonl:11", "broken_json")


def test_held_out_rows_stand_in_proportion_to_their_sources(folder: Path) -> None:
    rows = open_split(mixture(folder, {"large": 1.0, "small": 9.0}), "train", "label").rows
    names = Counter(rows.name(place).split(":")[0] for place in range(20))
    assert names == {"large": 18, "small": 2}


def test_another_source_does_not_change_the_order_of_the_first(folder: Path) -> None:
    write(folder, "third", 5)
    two = prompts_of(mixture(folder, {"large": 1.0, "small": 1.0}))
    three = prompts_of(mixture(folder, {"large": 1.0, "small": 1.0, "third": 1.0}))
    drawn = [
        [s for s in (prompts.next().sample_id for _ in range(300)) if s.startswith("large:")][:50]
        for prompts in (two, three)
    ]
    assert drawn[0] == drawn[1]


def test_a_source_without_rows_or_without_a_share_is_refused(folder: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"data\.mixture\.sources\.small has a share of 1e-06, .*data\.mixture\.temperature"
    ):
        open_split(mixture(folder, {"large": 1.0, "small": 1e-6}), "train", "label")
    write(folder, "empty", 0, "{broken")
    with pytest.raises(DatasetError, match=r"data\.mixture\.sources\.empty has no usable row"):
        prompts_of(mixture(folder, {"large": 1.0, "empty": 1.0}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=mixture"], "data.kind=mixture has no data.mixture.sources"),
        (["data=jsonl", "data.path=x", "data.mixture.sources={a: SOURCE}"], "leave it out, or set data.kind=mixture"),
        (["data=mixture", "data.mixture.sources={a: WRITTEN}"], "data.mixture.sources.a.kind=environment is no reader"),
        (
            ["data=mixture", "data.mixture.sources={a: SOURCE}", "data.mixture.sources.a.huggingface.subset=hard"],
            "is not read with data.mixture.sources.a.kind=jsonl: leave it out, or set .*kind=huggingface",
        ),
        (
            ["data=mixture", "data.mixture.sources={a: SOURCE}", "data.huggingface.subset=hard"],
            "data.huggingface.subset=hard is not read with data.kind=mixture",
        ),
        (["data=mixture", "data.mixture.sources={a: SOURCE}", "data.label=x"], "set data.mixture.sources.NAME.label"),
    ],
)
def test_a_mixture_needs_sources_that_are_read(words: list[str], message: str) -> None:
    texts = "path: a, row_format: question, media_path: '', label: ''"
    fields = f"{texts}, columns: {{}}, splits: {{}}, weight: 1.0"
    made = {"SOURCE": f"{{kind: jsonl, {fields}}}", "WRITTEN": f"{{kind: environment, {fields}}}"}
    for name, text in made.items():
        words = [word.replace(name, text) for word in words]
    with pytest.raises(ConfigError, match=message):
        load_config(["policy.model=m", *words])


def test_a_mixture_streams_from_the_hub_and_names_a_subset_in_its_source() -> None:
    source = "kind: huggingface, path: a, weight: 1.0, huggingface: {subset: hard, streamed_rows: 5}"
    words = ["policy.model=m", "data=mixture", f"data.mixture.sources={{a: {{{source}}}}}"]
    huggingface = load_config([*words, "data.mixture.temperature=2"]).data.mixture.sources["a"].huggingface
    assert (huggingface.subset, huggingface.streamed_rows) == ("hard", 5)
