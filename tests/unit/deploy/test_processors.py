"""Where a run's prompts are prepared: in the driver without processor workers, otherwise by them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from handles import LocalHandle

from mobula.actors.datasets.prompts import InDriver
from mobula.actors.processors.pool import ProcessorPool
from mobula.actors.processors.worker import ProcessorWorker
from mobula.cluster.records.media import MediaStore
from mobula.cluster.runtime.placement import NodeResources, PlacementPlan, inference_roles, needed_roles, plan_placement
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.pooled_roles import spawn_processors
from mobula.deploy.wiring.preparation import Prepared, workers_download

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


def prepared(config: RunConfig) -> Prepared:
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
    given, spawned = prepared(config), spawner(config)
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
    with_workers, found = spawn_processors(prepared(config), spawned, lambda kind: None)
    await found.start()
    assert isinstance(with_workers.preparation, ProcessorPool)
    assert spawned.started == [ProcessorWorker] * 2
    assert [watched.name for watched in found.watched] == ["processor"]
    assert [worker.name for worker in found.scalable["processor"].status()] == ["processor/0", "processor/1"]
