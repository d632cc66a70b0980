"""Every preset is planned on the cluster that it is made for, with a model that its memory holds."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest
from docs.generate import flow_sizes, scaling_guide
from docs.generate.scaling_guide import GPU_GB, LONG, NO_FIT, ROWS, models, shape_of, smallest
from tiny_checkpoints import shape_7b

from mobula.cluster.errors import PlacementError
from mobula.cluster.runtime.placement import needed_roles, plan_placement
from mobula.configs.load import load_config
from mobula.configs.overrides import groups, own_values
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import described_nodes
from mobula.deploy.planning.plan_command import plan_memory, remedies
from mobula.learner.policies.shapes import tiny_shape

ADAPTERS = ("policy.lora.rank=16", "reference.place=learner_ranks", "algorithm.kl.coef=0.01")
CRITIC, THREE = ["algorithm=ppo_gae", "algorithm.critic.place=own_ranks"], "resources.num_nodes=3"
EACH = ("learner", "rollout", "reference")
LENGTHS = ("data.max_prompt_tokens=2048", "sampler.max_tokens=1024", "sampler.max_model_len=3072")
SMALLER = {"one_gpu_16gb": "Qwen2.5-VL 3B"}
# preset -> the cluster, workers by role, and the words with which Qwen2.5-VL 7B (or SMALLER) fits; None: it is for the
# tiny model
PRESETS: dict[str, tuple[str, dict[str, int], list[str] | None]] = {
    "laptop": ("1x0x0GB:2x16GB", {"learner": 2, "rollout": 2, "reference": 1}, None),
    "laptop_colocated": ("1x0x0GB:2x16GB", {"learner": 2, "rollout": 2, "reference": 1}, None),
    "laptop_in_turns": ("1x0x0GB:2x16GB", dict.fromkeys(EACH, 1), None),
    "laptop_overlapped": ("1x0x0GB:2x16GB", dict.fromkeys(EACH, 1), None),
    "gpu_1": ("1x1x80GB", dict.fromkeys(EACH, 1), None),
    "one_gpu_16gb": ("1x1x16GB", dict.fromkeys(EACH[:2], 1), [*LENGTHS, "reference.place=learner_ranks"]),
    "one_gpu_24gb": ("1x1x24GB", dict.fromkeys(EACH[:2], 1), [*LENGTHS, "reference.place=learner_ranks"]),
    "one_gpu_colocated": ("1x1x141GB", dict.fromkeys(EACH, 1), ["policy.lora.rank=16"]),
    "two_gpu": ("1x2x80GB", dict.fromkeys(EACH, 1), ["policy.lora.rank=16"]),
    "four_gpu_split": ("1x4x141GB", dict.fromkeys(EACH, 2), ["learner.tokens_per_microbatch=3072"]),
    "eight_gpu_split": ("1x8x141GB", dict.fromkeys(EACH, 4), []),
    "eight_gpu_critic": ("1x8x141GB", {**dict.fromkeys(EACH, 3), "critic": 2}, CRITIC),
    "eight_gpu_colocated": ("1x8x141GB", dict.fromkeys(EACH, 8), []),
    "maye_8": ("1x8x141GB", {"learner": 7, "rollout": 1, "reference": 7}, []),
    "multi_node": ("3x8x141GB", dict.fromkeys(EACH, 12), [THREE]),
    "multi_node_large": ("3x8x141GB", {"learner": 12, "rollout": 3}, [THREE, *ADAPTERS[:2]]),
    "cross_node": ("2x1x80GB", dict.fromkeys(EACH, 1), ["policy.lora.rank=16"]),
}


@cache
def config(preset: str, *words: str) -> RunConfig:
    if PRESETS.get(preset, ("", {}, []))[2] is None:
        return load_config(["experiment=digits", f"resources={preset}", *words])
    base = [
        "experiment=own", f"resources={preset}", "algorithm.kl.coef=0.01", "learner.activation_checkpointing=blocks",
    ]  # fmt: skip
    return load_config([*base, *words], is_complete=False)


def test_every_preset_is_in_the_table() -> None:
    assert sorted(PRESETS) == list(groups()["resources"])


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_fits_its_cluster_and_puts_no_two_of_a_role_on_one_gpu(preset: str) -> None:
    cluster, workers, words = PRESETS[preset]
    shape = shape_7b() if words is not None else tiny_shape("qwen2.5-vl", tie_word_embeddings=False)
    shape = shape_of(SMALLER[preset]) if preset in SMALLER else shape
    nodes = described_nodes(cluster)
    plan = plan_memory(config(preset, *(words or [])), shape, nodes)
    assert {role: len(plan.placement.of_role(role)) for role in workers} == workers
    assert [f"{d.node_id} {d.place} {d.shortfall}" for d in plan.shortfalls] == []
    on_gpus = Counter((w.node_id, gpu, w.role) for w in plan.placement.workers for gpu in w.gpus)
    assert set(on_gpus.values()) <= {1}
    used = {(worker.node_id, gpu) for worker in plan.placement.workers for gpu in worker.gpus}
    assert len(used) == sum(int(node.resources.num_gpus) for node in nodes), "no GPU is idle"


@pytest.mark.parametrize("preset", [name for name, (cluster, *_) in PRESETS.items() if not cluster.startswith("1x0")])
def test_preset_is_refused_on_a_cluster_with_a_gpu_less(preset: str) -> None:
    cluster, _, words = PRESETS[preset]
    short = [*described_nodes(cluster)]
    last = short.pop().resources
    rest = [node.resources for node in short]
    if last.num_gpus > 1:
        rest.append(type(last)("short", last.num_cpus, last.num_gpus - 1))
    found = config(preset, *(words or []))
    with pytest.raises(PlacementError, match="fits nowhere"):
        plan_placement(found.resources, rest, needed_roles(found))


def test_workers_of_multi_node_follow_from_one_number() -> None:
    for number in (1, 5):
        found = config("multi_node", f"resources.num_nodes={number}").resources
        assert {found.rollout.num_workers, found.learner.num_workers, found.reference.num_workers} == {4 * number}
    assert config("multi_node", "resources.rollout.num_workers=6").resources.rollout.num_workers == 6


@pytest.mark.parametrize(
    ("model", "words", "size", "fits"),
    [
        *[
            pytest.param(model, words, size, True, marks=pytest.mark.exhaustive)
            for model in ("Qwen2.5-VL 32B", "Qwen3-VL 30B-A3B")
            for words, size in (((), "4x8x80GB"), (ADAPTERS, "2x8x80GB"))
        ],
        ("Qwen2.5-VL 72B", ADAPTERS, "2x8x80GB", True),
        ("Qwen2.5-VL 72B", (), "8x8x80GB", True),
        ("Qwen2.5-VL 72B", (), "4x8x80GB", False),
    ],
)
def test_large_models_fit_engines_over_four_gpus(model: str, words: tuple[str, ...], size: str, fits: bool) -> None:
    """With adapters, a KL term whose reference is sharded over the learner ranks has room as well."""
    longest = "learner.tokens_per_microbatch=3072"
    large = ["experiment=own", "resources=multi_node_large", f"resources.num_nodes={size[0]}", longest, *words]
    plan = plan_memory(load_config(large, is_complete=False), shape_of(model), described_nodes(size))
    assert {len(worker.gpus) for worker in plan.placement.of_role("rollout")} == {4}
    assert not plan.placement.of_role("reference")
    assert (plan.shortfalls == ()) == fits


def test_a_preset_with_engines_over_several_gpus_is_proposed_for_what_one_gpu_cannot_sample() -> None:
    nodes, shape = described_nodes("4x8x80GB"), shape_of("Qwen2.5-VL 72B")
    found = config("multi_node", "resources.num_nodes=4", "learner.tokens_per_microbatch=3072")
    assert plan_memory(found, shape, nodes).shortfalls
    ways = remedies(found, shape, nodes)
    assert any("resources=multi_node_large resources.num_nodes=4" in way for way in ways), ways
    assert any("reference.place=learner_ranks" in way for way in ways), ways


def test_learner_ranks_of_two_nodes_share_one() -> None:
    plan = plan_memory(config("multi_node", "resources.num_nodes=2"), shape_7b(), described_nodes("2x8x141GB"))
    assert {worker.node_id for worker in plan.placement.of_role("learner")} == {"node-0"}
    assert {worker.node_id for worker in plan.placement.of_role("rollout")} == {"node-1"}


def test_no_preset_has_two_names() -> None:
    values = [own_values("resources", preset) for preset in groups()["resources"]]
    named = [{**each, "resources": dict(each["resources"])} for each in values]
    contents = [each for each in named if each["resources"].pop("preset")]
    assert not [content for n, content in enumerate(contents) if content in contents[:n]]


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
    return {(p, model): cell for p, row in rows.items() for model, cell in zip(models(), row, strict=True)}


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
    found = [smallest(shape_of(model), row, lengths, way) for way in ("weights", "adapters")]
    said = " / ".join(NO_FIT if size is None else str(size) for size in found)
    assert cells(table)[row, model] == said, "run `python -m docs.generate.scaling_guide`"


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[] if name == "Sana 1.6B" else [pytest.mark.exhaustive]) for name in flow_sizes.models()],
)
def test_a_row_of_the_flow_models_is_what_the_planner_says_today(model: str) -> None:
    assert flow_sizes.row_of(model) in PAGE.splitlines(), "run `python -m docs.generate.flow_sizes`"


def test_larger_models_need_no_smaller_gpu_and_adapters_none_that_is_larger() -> None:
    sizes = {NO_FIT: 10**6, **{str(size): size for size in GPU_GB}}
    for table in range(len(TABLES)):
        found = {key: [sizes[part] for part in cell.split(" / ")] for key, cell in cells(table).items()}
        for row in ROWS:
            weights = [found[row, model][0] for model in models()]
            assert weights == sorted(weights), row
            assert all(found[row, model][1] <= found[row, model][0] for model in models()), row


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("Qwen3 0.6B", 0.6, marks=pytest.mark.exhaustive),
        ("Qwen2.5-VL 3B", 3.8),
        ("Qwen2.5-VL 7B", 8.3),
        pytest.param("Qwen3-VL 30B-A3B", 31.1, marks=pytest.mark.exhaustive),
        pytest.param("Qwen2.5-VL 32B", 33.4, marks=pytest.mark.exhaustive),
        ("Qwen2.5-VL 72B", 73.4),
    ],
)
def test_a_model_has_the_size_of_its_name(name: str, size: float) -> None:
    assert shape_of(name).num_parameters / 1e9 == pytest.approx(size, rel=0.05)
