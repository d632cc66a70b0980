"""Media of a group: prompts of eight siblings prepared once and shared, over each sibling prepared apart.

Both sides begin with image files and end with the arrays of every sibling as a forward pass takes them: decoded,
checked, turned upright, resized, cut into patches and stored. Ours does what a run does: one prompt a group, a store
under the content's hash, and a reader that siblings share. The other side prepares every sibling from the file.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements, Side, interleave, rates
from mobula.actors.datasets.rows import Row
from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.records.media import MediaHandle, MediaReader, MediaStore, ProcessedMedia
from mobula.configs.load import load_config
from mobula.learner.policies.tiny import write_tiny

MODEL = "qwen2.5-vl"  # its processor is that of the released checkpoints
NUM_SIBLINGS, NUM_GROUPS, QUICK_GROUPS = 8, 8, 2
SIZE = (800, 600)  # of an image
MIN_RATIO = 5.0
UNIT = "siblings/s"
SIDES = {
    "shared": "one prompt a group, its image processed and stored once, read by eight siblings",
    "apart": "every sibling's image read, processed and stored by itself",
}


@dataclass(frozen=True)
class Groups:
    """Prepare these image files, a group each."""

    files: tuple[Path, ...]


@dataclass(frozen=True)
class Done:
    """Measurements of one side, and a number that both sides must agree on."""

    seconds: float  # of the CPU, which does not count those of other processes
    checksum: float  # of all siblings' arrays


class NoStore(MediaStore):
    """In the place of a MediaStore: a medium is made whenever it is asked for."""

    def get_or_add(self, key: str, source: str, process: Callable[[], ProcessedMedia]) -> MediaHandle:
        media = process()
        return MediaHandle(key, media.modality, media.num_bytes, media, source)


class Preparation:
    """One side, in a process of its own."""

    def __init__(self, side: str, model: Path) -> None:
        self._is_shared = side == "shared"
        words = ["experiment=digits", f"policy.model={model}", f"data.max_pixels={SIZE[0] * SIZE[1]}"]
        self._config = load_config([*words, "data.max_prompt_tokens=1024", "sampler.max_model_len=1032"])

    def __call__(self, job: Groups) -> Done:
        processor = self._processor()  # nothing of an earlier round is kept
        started = time.process_time()
        checksum = sum(self._group(processor, file, number) for number, file in enumerate(job.files))
        return Done(time.process_time() - started, checksum)

    def _processor(self) -> ChatProcessor:
        kind = MediaStore if self._is_shared else NoStore
        store = kind(lambda media: media, self._config.data.media_cache_bytes)
        return ChatProcessor(
            self._config.policy.model, self._config.data, self._config.sampler, store, keep_files=False
        )

    def _group(self, processor: ChatProcessor, file: Path, number: int) -> float:
        """Sum over all siblings' arrays."""
        row = Row(file.name, "<image>Which colours does this image have?", "none", "none", (file,))
        shared = processor.prepare(row, f"0/{number}/{file.name}") if self._is_shared else None
        reader = MediaReader(timeout_s=1, max_items=1)
        found = 0.0
        for sibling in range(NUM_SIBLINGS):
            prompt = shared or processor.prepare(row, f"0/{number}/{file.name}#{sibling}")
            [media] = (reader if self._is_shared else MediaReader(timeout_s=1, max_items=1)).read(prompt.media)
            found += sum(float(array.flat[0]) + array.size for array in media.inputs.values())
        return found


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Both sides in turn; the overrides say nothing here."""
    num_groups = QUICK_GROUPS if effort == QUICK else NUM_GROUPS
    env = {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="mobula-") as folder:
        model = write_tiny(MODEL, Path(folder) / "model")
        job = Groups(tuple(_write(Path(folder), number) for number in range(num_groups)))
        with (
            apart(Preparation, "shared", model, env=env) as shared,
            apart(Preparation, "apart", model, env=env) as each,
        ):
            sums: dict[str, float] = {}
            sides = {"shared": _side("shared", shared, job, sums), "apart": _side("apart", each, job, sums)}
            found = asyncio.run(interleave(sides, effort))
    assert sums["shared"] == sums["apart"], f"the sides prepared other arrays: {sums}"
    series = {name: Measurements(what, UNIT, found[name]) for name, what in SIDES.items()}
    claims = (Claim(f"shared / apart, {NUM_SIBLINGS} siblings", rates(series["shared"], series["apart"]), MIN_RATIO),)
    return Findings({"groups": num_groups, "siblings": NUM_SIBLINGS, "image": SIZE, "format": "jpeg"}, series, claims)


def _write(folder: Path, number: int) -> Path:
    """An image of smooth colours with noise, as JPEG."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, size=(6, 8, 3), dtype=np.uint8)).resize(SIZE)
    noisy = np.asarray(coarse).astype(np.int16) + rng.integers(-12, 13, size=(SIZE[1], SIZE[0], 3))
    file = folder / f"image-{number}.jpg"
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file)
    return file


def _side(name: str, peer: Peer[Groups, Done], job: Groups, sums: dict[str, float]) -> Side:
    async def side(round_number: int) -> float:
        done = await asyncio.to_thread(peer.ask, job)
        sums[name] = done.checksum
        return NUM_SIBLINGS * len(job.files) / done.seconds

    return side
