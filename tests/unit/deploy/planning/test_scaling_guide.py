"""The tables of docs/scaling.md are the planner's: their rows and columns, and cells that are planned again."""

from __future__ import annotations

import re

import pytest
from docs.generate import scaling_guide
from docs.generate.scaling_guide import GPU_GB, LONG, NO_FIT, ROWS, shapes, smallest

from mobula.configs.overrides import groups

PAGE = scaling_guide.TARGET.read_text(encoding="utf-8")
TABLES = [
    [
        ((preset, int(nodes), int(gpus)), row)
        for preset, nodes, gpus, row in re.findall(r"^\| `(\w+)` \((\d+) x (\d+) GPUs\) \|(.*)\|$", part, re.MULTILINE)
    ]
    for part in PAGE.split("\n| prompts of ")[1:]
]


def cells(table: int) -> dict[tuple[tuple[str, int, int], str], str]:
    """(row, model) -> the cell on the page."""
    rows = {key: [cell.strip() for cell in row.split("|")] for key, row in TABLES[table]}
    return {(p, model): cell for p, row in rows.items() for model, cell in zip(shapes(), row, strict=True)}


def test_every_gpu_preset_is_on_the_page() -> None:
    known = set(groups()["resources"])
    assert {preset for preset, *_ in ROWS} <= known
    for table in TABLES:
        assert [row for row, _ in table] == list(ROWS), "run `python -m docs.generate.scaling_guide`"


@pytest.mark.parametrize(
    ("table", "lengths", "row", "model"),
    [
        (0, (), ("two_gpu", 1, 2), "Qwen2.5-VL 3B"),
        (0, (), ("eight_gpu_split", 1, 8), "Qwen2.5-VL 7B"),
        (1, LONG, ("maye_8", 1, 8), "Qwen2.5-VL 7B"),
        (0, (), ("multi_node_large", 8, 8), "Qwen2.5-VL 72B"),
    ],
)
def test_a_cell_is_what_the_planner_says_today(
    table: int, lengths: tuple[str, ...], row: tuple[str, int, int], model: str
) -> None:
    found = [smallest(shapes()[model], row, lengths, way) for way in ("weights", "adapters")]
    said = " / ".join(NO_FIT if size is None else str(size) for size in found)
    assert cells(table)[row, model] == said, "run `python -m docs.generate.scaling_guide`"


def test_larger_models_need_no_smaller_gpu_and_adapters_none_that_is_larger() -> None:
    sizes = {NO_FIT: 10**6, **{str(size): size for size in GPU_GB}}
    for table in range(len(TABLES)):
        found = {key: [sizes[part] for part in cell.split(" / ")] for key, cell in cells(table).items()}
        for row in ROWS:
            weights = [found[row, model][0] for model in shapes()]
            assert weights == sorted(weights), row
            assert all(found[row, model][1] <= found[row, model][0] for model in shapes()), row


def test_the_models_have_the_sizes_of_their_names() -> None:
    found = {name: shape.num_parameters / 1e9 for name, shape in shapes().items()}
    expected = {
        "Qwen3 0.6B": 0.6,
        "Qwen2.5-VL 3B": 3.8,
        "Qwen2.5-VL 7B": 8.3,
        "Qwen3-VL 30B-A3B": 31.1,
        "Qwen2.5-VL 32B": 33.4,
    }
    for name, size in {**expected, "Qwen2.5-VL 72B": 73.4}.items():
        assert found[name] == pytest.approx(size, rel=0.05), name
