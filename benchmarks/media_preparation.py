"""Preparing prompts of large images and videos: samples/s in the driver, on one and on two processor workers.

A sample is a row's prompt with its media decoded, processed and stored. Every measurement begins without any. Beside
it what a group of n = 8 siblings costs that is prepared once, over preparing each of them apart, and how many bytes all
groups take in Ray's object store with n = 8 siblings over one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.stage import private_ray, scratch_config, scratch_folder, staged  # isort: skip  (sets what ray reads when imported)
import numpy as np
import ray
from PIL import Image
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, interleave, share
from benchmarks.replay import Load, make_group
from mobula.actors.datasets.prompts import InDriver, Preparation, PromptSource
from mobula.actors.processors.media import require_av
from mobula.actors.processors.pool import ProcessorPool
from mobula.actors.processors.worker import ProcessorWorker, make_processor
from mobula.cluster.records.media import MediaHandle, MediaStore, ProcessedMedia
from mobula.cluster.records.trajectory import TrajectoryGroup
from mobula.cluster.workers.status import RestartPolicy
from mobula.deploy.wiring.preparation import TRAIN, Prepared

NUM_WORKERS = 2
NUM_GROUPS, NUM_SIBLINGS = 8, 8
NUM_IMAGES, NUM_VIDEOS = 24, 8
IMAGE, FRAME, NUM_FRAMES, RATE = (1600, 1200), (480, 360), 64, 16
ANSWERS = Load("answers", num_groups=1, num_tokens=64, num_trips=1)  # of the groups whose bytes are counted
SETTLE_S = 0.5  # between readings, three of which have to be equal
STORE_BYTES = 1 << 30
EIGHT_OVER_ONE_BYTES = 1.05
ONCE_OVER_APART, TWO_OVER_ONE = 5.0, 1.3  # on two cores, which the driver needs a part of
SETTINGS = (
    f"resources.processor.num_workers={NUM_WORKERS}",
    "resources.processor.num_cpus=0.9",
    "data=jsonl",
    "data.max_prompt_tokens=4000",
    "sampler.max_model_len=4096",
    "sampler.max_videos_per_prompt=1",
    "data.max_checked_rows=1",
    f"data.media_cache_bytes={STORE_BYTES}",
)


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """All sides in turn, on the workers of one run."""
    with scratch_folder() as data:
        _write(data)
        settings = (*SETTINGS, f"data.path={data}")
        with scratch_config(settings, overrides) as config, private_ray(config):
            return asyncio.run(_measure(effort, config))


async def _measure(effort: Effort, config: Any) -> Findings:
    async with staged(config, ("processor",)) as stage:
        seats = stage.spawner.workers("processor")
        workers = [stage.spawner.start(ProcessorWorker, config, worker=seat) for seat in seats]
        await asyncio.gather(*(asyncio.wrap_future(worker.ping.remote().future()) for worker in workers))
        prepared = stage.prepared
        sides = {
            "driver": partial(_rate, prepared, lambda: _driver(prepared)),
            "one": partial(_rate, prepared, lambda: _pool(prepared, workers[:1])),
            "two": partial(_rate, prepared, lambda: _pool(prepared, workers)),
            "siblings once": partial(_siblings, prepared, is_apart=False),
            "siblings apart": partial(_siblings, prepared, is_apart=True),
        }
        found = await interleave(sides, effort)
        # Bytes do not vary, and what fills the object store would slow the rounds above.
        found["bytes of one"] = (await _stored_bytes(prepared, workers, 1),)
        found["bytes of eight"] = (await _stored_bytes(prepared, workers, NUM_SIBLINGS),)
    return _findings(found)


def _findings(found: dict[str, tuple[float, ...]]) -> Findings:
    rows = f"{NUM_IMAGES} images of {IMAGE[0]} x {IMAGE[1]}, {NUM_VIDEOS} videos of {NUM_FRAMES} frames"
    return Findings(
        settings={"images": NUM_IMAGES, "videos": NUM_VIDEOS, "siblings": NUM_SIBLINGS},
        series={
            "driver": Measurements(f"rows prepared in the driver: {rows}", "samples/s", found["driver"]),
            "one": Measurements("the same on one worker", "samples/s", found["one"]),
            "two": Measurements("the same on two workers", "samples/s", found["two"]),
            "siblings once": Measurements(
                "siblings whose prompt is prepared once", "samples/s", found["siblings once"]
            ),
            "siblings apart": Measurements("siblings, each prepared", "samples/s", found["siblings apart"]),
            "bytes of one": Measurements("object store: a group of one of each row", "bytes", found["bytes of one"]),
            "bytes of eight": Measurements(
                f"object store: a group of {NUM_SIBLINGS} of each row", "bytes", found["bytes of eight"]
            ),
        },
        claims=(
            Claim("two workers / one", share(found["two"], found["one"]), TWO_OVER_ONE),
            Claim("two workers / driver", share(found["two"], found["driver"])),
            Claim("siblings once / apart", share(found["siblings once"], found["siblings apart"]), ONCE_OVER_APART),
            Claim(
                "bytes in the object store, eight siblings / one",
                share(found["bytes of eight"], found["bytes of one"]),
                EIGHT_OVER_ONE_BYTES,
                at_least=False,
            ),
        ),
    )


async def _rate(prepared: Prepared, preparation: Any, _: int) -> float:
    num = NUM_IMAGES + NUM_VIDEOS
    source = PromptSource(prepared.splits[TRAIN].rows, preparation(), seed=0, split_name=TRAIN)
    started = time.perf_counter()
    prompts = await asyncio.to_thread(lambda: [source.next() for _ in range(num)])
    took_s = time.perf_counter() - started
    assert not source.skipped and len({prompt.media[0].key for prompt in prompts}) == num
    return num / took_s


async def _siblings(prepared: Prepared, _: int, *, is_apart: bool) -> float:
    """Siblings/s of the first rows; apart, none of them knows what another has."""
    rows = prepared.splits[TRAIN].rows[:NUM_GROUPS]
    processor = make_processor(prepared.config, _NoStore())

    def groups() -> None:
        for row in rows:
            for _ in range(NUM_SIBLINGS if is_apart else 1):
                processor.prepare(row, f"0/0/{row.sample_id}")

    started = time.perf_counter()
    await asyncio.to_thread(groups)
    return len(rows) * NUM_SIBLINGS / (time.perf_counter() - started)


async def _stored_bytes(prepared: Prepared, workers: list[Any], num_siblings: int) -> float:
    """Bytes of Ray's object store that a group of every row takes, its prompt prepared by the workers."""
    before = await _used_bytes()
    pool, num = _pool(prepared, workers), NUM_IMAGES + NUM_VIDEOS
    source = PromptSource(prepared.splits[TRAIN].rows, pool, seed=0, split_name=TRAIN)
    prompts = await asyncio.to_thread(lambda: [source.next() for _ in range(num)])
    source.restore(source.cursor, [])  # prompts that were begun ahead are given up
    answers = make_group(ANSWERS).trajectories[:num_siblings]
    groups = [ray.put(TrajectoryGroup(prompt, answers)) for prompt in prompts]
    used = await _used_bytes() - before
    assert used > sum(handle.num_bytes for prompt in prompts for handle in prompt.media), "the media are among them"
    del groups
    return used


async def _used_bytes() -> float:
    """Bytes in use once those of earlier rounds are freed."""
    gc.collect()
    state, readings = get_state_from_address(ray.get_runtime_context().gcs_address), [-1.0, -2.0, -3.0]
    while len(set(readings[-3:])) > 1:
        await asyncio.sleep(SETTLE_S)
        readings.append(get_memory_info_reply(state).store_stats.object_store_bytes_used)
    return readings[-1]


class _NoStore:
    """Implements `MediaKeeper`: every medium is processed and put, also if it is stored already."""

    def get_or_add(self, key: str, source: str, process: Callable[[], ProcessedMedia]) -> MediaHandle:
        media = process()
        return MediaHandle(key, media.modality, media.num_bytes, ray.put(media), source)


def _driver(prepared: Prepared) -> Preparation:
    return InDriver(make_processor(prepared.config, MediaStore(ray.put, STORE_BYTES)))


def _pool(prepared: Prepared, workers: list[Any]) -> Preparation:
    return ProcessorPool(
        workers,
        MediaStore(ray.put, STORE_BYTES),
        prepared.processor.num_media,
        hosts=_NoHosts(),
        restarts=RestartPolicy(max_restarts=0, window_s=1, backoff_s=0, max_backoff_s=0),
        start_s=60,
        alive_s=60,
        timeout_s=60,
        object_s=60,
        on_lost=lambda kind: None,
    )


class _NoHosts:
    """A worker that is lost ends the benchmark."""

    async def start(self, index: int) -> Any:
        raise RuntimeError(f"worker {index} was lost")

    async def stop(self, index: int, handle: Any) -> None: ...

    async def release(self, index: int) -> None: ...


def _write(folder: Path) -> None:
    rows: list[dict[str, Any]] = []
    for number in range(NUM_IMAGES):
        _noise(number, IMAGE).save(folder / f"{number}.jpg", quality=90)
        rows.append({"question": "<image>What is this?", "image": f"{number}.jpg"})
    for number in range(NUM_VIDEOS):
        _write_video(folder / f"{number}.mp4", number)
        rows.append({"question": "<video>What is this?", "video": f"{number}.mp4"})
    lines = [json.dumps({"id": str(number), "answer": "1", **row}) for number, row in enumerate(rows)]
    for split in (TRAIN, "validation", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines))


def _noise(seed: int, size: tuple[int, int]) -> Image.Image:
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def _write_video(path: Path, seed: int) -> None:
    av = require_av()
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height = FRAME
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, RATE)
        for number in range(NUM_FRAMES):
            frame = av.VideoFrame.from_image(_noise(seed * NUM_FRAMES + number, FRAME))
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
