"""Processor workers as real actors: images and videos come by reference, a killed worker and damaged files lose
nothing else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from clips import noise_frames, write_clip
from data_rows import encoded
from fakes import AT_ONCE, FakeHosts
from http_servers import PROXIES, media_server

from mobula.actors.datasets.prompts import PromptSource
from mobula.actors.processors.pool import DIED, ProcessorPool
from mobula.actors.processors.worker import ProcessorWorker
from mobula.cluster.records.media import MediaStore
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.runtime.ray_actors import answer
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import Prepared, prepare

NUM_IMAGES = 20


def write_rows(folder: Path) -> None:
    """Rows of one large image each, one of a video, one of an image that is cut behind its header."""
    folder.mkdir()
    for place, image in enumerate(noise_frames(NUM_IMAGES, (640, 480))):
        image.save(folder / f"{place}.png")
    whole = (folder / "0.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    write_clip(folder / "clip.mkv", noise_frames(8, (96, 64)))
    rows = [{"question": "<image>?", "image": f"{place}.png"} for place in range(NUM_IMAGES)]
    rows += [{"question": "<video>?", "video": "clip.mkv"}, {"question": "<image>?", "image": "cut.png"}]
    lines = (json.dumps({"id": f"r{place}", "answer": "1", **row}) for place, row in enumerate(rows))
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines if split == "train" else [json.dumps(TEXT)]))


TEXT = {"id": "text", "question": "One?", "answer": "1"}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    write_rows(tmp_path / "data")
    paths = [f"policy.model={tmp_path / 'model'}", f"data.path={tmp_path / 'data'}", f"folder={tmp_path}"]
    limits = ["data.max_prompt_tokens=1024", "sampler.max_model_len=1100", "sampler.max_videos_per_prompt=1"]
    return load_config(["experiment=digits", "data=jsonl", *paths, *limits, "resources.processor.num_workers=2"])


def spawn(config: RunConfig) -> Any:
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "NO_PROXY": "127.0.0.1"}
    actor = ray.remote(concurrency_groups={"health": 1})(ProcessorWorker)
    return actor.options(num_cpus=0.5, runtime_env={"env_vars": environment}).remote(config)


def make_pool(prepared: Prepared, store: MediaStore, workers: list[Any], losses: list[str]) -> ProcessorPool:
    more = {"hosts": FakeHosts(lambda index: spawn(prepared.config), end=ray.kill), "on_lost": losses.append}
    deadlines = {"start_s": 120, "alive_s": 60, "timeout_s": 60, "object_s": 30}
    return ProcessorPool(workers, store, prepared.processor.num_media, restarts=AT_ONCE, **deadlines, **more)


async def test_prompts_of_workers_equal_those_of_the_driver_through_a_loss(local_ray: str, config: RunConfig) -> None:
    prepared = prepare(config, lambda value: value)
    rows = prepared.splits["train"].rows
    expected = PromptSource(rows, prepared.preparation, seed=0, split_name="train")
    want = [expected.next() for _ in range(NUM_IMAGES + 1)]

    workers, losses = [spawn(config) for _ in range(2)], list[str]()
    store = MediaStore(lambda value: pytest.fail("the driver processed a medium"), 1 << 30)
    pool = make_pool(prepared, store, workers, losses)
    await pool.start()
    source = PromptSource(rows, pool, seed=0, split_name="train")
    got: list[Prompt] = []
    for place in range(NUM_IMAGES + 1):
        got.append(await asyncio.to_thread(source.next))
        if place == 5:
            ray.kill(workers[0])
    await pool.pool.close()  # what the workers returned outlives all of them

    assert [p.prompt_id for p in got] == [p.prompt_id for p in want] and losses == [DIED]
    assert source.skipped == expected.skipped and [s.sample for s in source.skipped] == ["r21"]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.media == theirs.media and np.array_equal(ours.expanded_ids, theirs.expanded_ids)
        for handle, reference in zip(ours.media, theirs.media, strict=True):
            assert isinstance(handle.reference, ray.ObjectRef)
            found = await answer(handle.reference, timeout_s=30, what="a medium")
            for name, array in reference.reference.inputs.items():
                assert np.array_equal(found.inputs[name], array)
    assert store.num_bytes_unique == prepared.media.num_bytes_unique


async def test_web_files_come_by_workers_alone(local_ray: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver, whose HTTP client fails, gets the prompts that it makes of the same files without workers."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    whole = write_web_rows(tmp_path / "data")
    with media_server(whole) as server:
        (tmp_path / "data" / "train.jsonl").write_text(
            (tmp_path / "data" / "train.jsonl").read_text().replace("SERVER", server.url)
        )
        local = prepare(load_config(web_words(tmp_path, "own cache")), lambda value: value)
        expected = PromptSource(local.splits["train"].rows, local.preparation, seed=0, split_name="train")
        want = [expected.next() for _ in range(NUM_WEB)]
        assert [(s.sample, s.reason) for s in local.skipped] == [("train.jsonl:5 (r4)", "download_failed")]
        server.asked.clear()

        config = load_config([*web_words(tmp_path, "cache"), "resources.processor.num_workers=2"])
        monkeypatch.setattr(httpx, "Client", lambda **_: pytest.fail("the driver opened a connection"))
        prepared = prepare(config, lambda value: value)
        assert len(prepared.splits["train"].rows) == NUM_WEB + 1 and server.asked == []
        pool = make_pool(prepared, MediaStore(lambda value: None, 1 << 30), [spawn(config) for _ in range(2)], [])
        await pool.start()
        source = PromptSource(prepared.splits["train"].rows, pool, seed=0, split_name="train")
        got = [await asyncio.to_thread(source.next) for _ in range(2 * (NUM_WEB + 1))]
        await pool.pool.close()

    assert {p.sample_id for p in got} == {p.sample_id for p in want}
    texts = {p.sample_id: (p.expanded_ids.tolist(), [medium.key for medium in p.media]) for p in want}
    assert all((p.expanded_ids.tolist(), [medium.key for medium in p.media]) == texts[p.sample_id] for p in got)
    [skipped] = source.skipped
    assert (skipped.sample, skipped.reason) == ("r4", "download_failed") and "/absent.png cannot be" in skipped.detail
    assert all(1 <= server.asked.count(path) <= 2 for path in whole), "later epochs read the cache, which workers share"


NUM_WEB = 4  # rows that can be used


def web_words(folder: Path, cache: str) -> list[str]:
    paths = [f"policy.model={folder / 'model'}", f"data.path={folder / 'data'}", f"folder={folder}"]
    limits = ["sampler.max_images_per_prompt=2", "data.max_skipped_fraction=0.5", "data.allowed_hosts=[127.0.0.1]"]
    lengths = ["data.max_prompt_tokens=1024", "sampler.max_model_len=1100"]
    return ["experiment=digits", "data=jsonl", *paths, *limits, *lengths, f"data.cache_path={folder / cache}"]


def write_web_rows(folder: Path) -> dict[str, bytes]:
    """Rows of two web images each, the last of one that is not there; the files by their path."""
    folder.mkdir()
    whole = {f"/{place}.png": encoded(image) for place, image in enumerate(noise_frames(2 * NUM_WEB, (96, 64)))}
    pairs = [[f"SERVER/{2 * n}.png", f"SERVER/{2 * n + 1}.png"] for n in range(NUM_WEB)]
    rows = [{"question": "<image> or <image>?", "images": pair} for pair in pairs]
    rows += [{"question": "<image>?", "images": ["SERVER/absent.png"]}]
    lines = [json.dumps({"id": f"r{place}", "answer": "1", **row}) for place, row in enumerate(rows)]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines if split == "train" else [json.dumps(TEXT)]))
    return whole
