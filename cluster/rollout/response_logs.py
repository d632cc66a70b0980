"""Logs of an evaluation's responses: files, contact sheets, and answers for the report."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.report.samples import SHEETS_FILE, HeldOutAnswer, write_answers
from mobula.cluster.metrics.step_records import HELD_OUT
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.trajectory import Answers, Response, TrajectoryGroup
from mobula.cluster.rollout.evaluation import ResponseLog, ScoredPrompt
from mobula.cluster.runtime.object_store import fetch

MAX_PROMPTS, MAX_SAMPLES = 48, 8  # on one sheet
PROMPTS_A_ROW = 6
SIDE = 128  # pixels; larger images are scaled down
SMALL = 32  # pixels; smaller images are scaled up
GAP = 2  # pixels between images


class ContactSheets:
    """Writes `<folder>/<suite>-<version>.png`, prompt by prompt, and its SHA-256 into `sheets.json`. Condition images
    stand before the images that were made of them."""

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        """`timeout_s` bounds the fetch of one prompt's images from the object store."""
        self._folder = folder
        self._timeout_s = timeout_s

    async def write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None:
        await asyncio.to_thread(self._write, suite, version, prompts)

    def _write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None:
        shown = [(p.prompt.text, self._images(p)[:MAX_SAMPLES]) for p in prompts[:MAX_PROMPTS]]
        images = [image for _, of_prompt in shown for image in of_prompt]
        if not images:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        per_prompt = max(len(of_prompt) for _, of_prompt in shown)
        sheet = contact_sheet(images, columns=PROMPTS_A_ROW * per_prompt)
        name = f"{suite}-{version}.png"
        (self._folder / name).write_bytes(sheet)
        digest, texts = hashlib.sha256(sheet).hexdigest(), [text for text, images in shown if images]
        path = self._folder / SHEETS_FILE
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        rows = [row for row in rows if row["file"] != name]
        rows.append({"file": name, "suite": suite, "version": version, "sha256": digest, "prompts": texts})
        write_atomically(path, json.dumps(rows, indent=1, ensure_ascii=False))

    def _images(self, scored: ScoredPrompt) -> list[bytes]:
        responses = _responses(scored, "images", self._timeout_s)
        images = [response.images[0] for response in responses if response.images]
        return [*_thumbnails(scored, self._timeout_s), *images] if images else []


def contact_sheet(images: Sequence[bytes], columns: int) -> bytes:
    """Returns one PNG of encoded images, row by row, in tiles of equal size."""
    tiles = [_tile(image) for image in images]
    width, height = (max(tile.size[axis] for tile in tiles) + GAP for axis in (0, 1))
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (width * min(columns, len(tiles)) + GAP, height * rows + GAP), (90, 90, 90))
    for index, tile in enumerate(tiles):
        sheet.paste(tile, (GAP + index % columns * width, GAP + index // columns * height))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _tile(image: bytes) -> Image.Image:
    with Image.open(io.BytesIO(image)) as opened:
        tile = opened.convert("RGB")
    factor = -(-SMALL // max(tile.size))
    if factor > 1:
        return tile.resize((tile.width * factor, tile.height * factor), Image.Resampling.NEAREST)
    tile.thumbnail((SIDE, SIDE))
    return tile


class ResponseFiles:
    """Writes `<folder>/<suite>-<version>.jsonl`.

    A row has `id`, `prompt`, `references`, `metadata`, and with one entry per response `predictions`,
    `generated_tokens`, `is_truncated`, `correct` (null if the response was not scored) and `components`. An excluded
    prompt has no predictions. `mobula score` reads these files.
    """

    def __init__(self, folder: Path, *, accuracy_component: str, correct_from: float, timeout_s: float) -> None:
        """`timeout_s` bounds the fetch of one prompt's responses from the object store."""
        self._folder = folder
        self._accuracy_component = accuracy_component
        self._correct_from = correct_from
        self._timeout_s = timeout_s

    async def write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None:
        await asyncio.to_thread(self._write, self._folder / f"{suite}-{version}.jsonl", prompts)

    def _write(self, path: Path, prompts: Sequence[ScoredPrompt]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = (json.dumps(self._row(prompt), ensure_ascii=False, default=str) + "\n" for prompt in prompts)
        write_atomically(path, "".join(rows))

    def _row(self, scored: ScoredPrompt) -> dict[str, object]:
        name = self._accuracy_component
        responses = _responses(scored, "responses", self._timeout_s)
        components = [None if reward is None else dict(reward.components) for reward in scored.rewards]
        return {
            "id": scored.prompt.sample_id,
            "prompt": scored.prompt.text,
            "references": list(scored.prompt.references),
            "metadata": dict(scored.prompt.metadata),
            "predictions": [response.text for response in responses],
            "generated_tokens": [response.num_tokens for response in responses],
            "is_truncated": [response.is_truncated for response in responses],
            "correct": [row[name] >= self._correct_from if row and name in row else None for row in components],
            "components": components,
        }


NUM_ANSWERS = 12  # of the run's own suite, in the report


@dataclass(frozen=True)
class FirstAnswers:
    """Writes to another log, and the answers to the first rows of the run's own suite to `folder` for the report."""

    log: ResponseLog
    folder: Path
    timeout_s: float  # bounds the fetch of one prompt's response, or of its images

    async def write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None:
        await self.log.write(suite, version, prompts)
        if suite == HELD_OUT:
            await asyncio.to_thread(self._write, version, prompts[:NUM_ANSWERS])

    def _write(self, version: int, prompts: Sequence[ScoredPrompt]) -> None:
        found = []
        for scored in prompts:
            prompt, responses = scored.prompt, _responses(scored, "answers", self.timeout_s)
            images = _thumbnails(scored, self.timeout_s)
            reward = next((reward.value for reward in scored.rewards if reward is not None), None)
            text = responses[0].text if responses else ""
            found.append(HeldOutAnswer(prompt.sample_id, prompt.text, prompt.references, images, text, reward))
        write_answers(self.folder, version, found)


def _thumbnails(scored: ScoredPrompt, timeout_s: float) -> tuple[bytes, ...]:
    """Images of the prompt."""
    handles, what = [h.reference for h in scored.prompt.media], f"the images of {scored.prompt.prompt_id}"
    media: list[ProcessedMedia] = fetch(handles, timeout_s=timeout_s, what=what) if handles else []
    return tuple(medium.thumbnail for medium in media if medium.thumbnail)


def _responses(scored: ScoredPrompt, kind: str, timeout_s: float) -> Sequence[Response]:
    if scored.generated is None:
        return []
    what = f"the {kind} of {scored.prompt.prompt_id}"
    [group] = fetch([scored.generated.to_score], timeout_s=timeout_s, what=what)
    if isinstance(group, Answers):
        return group.responses
    assert isinstance(group, TrajectoryGroup), f"{what} are a {type(group).__name__}"
    return [trajectory.response for trajectory in group.trajectories]
