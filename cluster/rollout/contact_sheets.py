"""ContactSheets: the pictures of evaluations, side by side in one PNG file for each suite and version."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from mobula.cluster.metrics.files import write_atomically
from mobula.cluster.metrics.report.sheets import SHEETS_FILE
from mobula.cluster.records.trajectory import Answers, TrajectoryGroup
from mobula.cluster.rollout.evaluation import ScoredPrompt
from mobula.cluster.runtime.object_store import fetch

MAX_PROMPTS, MAX_SAMPLES = 48, 8  # on one sheet
PROMPTS_A_ROW = 6
SIDE = 128  # pixels: larger pictures are scaled down to it
SMALL = 32  # pixels: smaller ones are scaled up to it at least
GAP = 2  # pixels between pictures


class ContactSheets:
    """Writes `<folder>/<suite>-<version>.png`, one prompt after the other, and its SHA-256 into `sheets.json`."""

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        """`timeout_s` bounds the fetch of one prompt's pictures from the object store."""
        self._folder = folder
        self._timeout_s = timeout_s

    async def write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None:
        await asyncio.to_thread(self._write, suite, version, prompts)

    def _write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None:
        shown = [(p.prompt.text, self._pictures(p)[:MAX_SAMPLES]) for p in prompts[:MAX_PROMPTS]]
        pictures = [picture for _, found in shown for picture in found]
        if not pictures:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        per_prompt = max(len(found) for _, found in shown)
        sheet = joined(pictures, columns=PROMPTS_A_ROW * per_prompt)
        name = f"{suite}-{version}.png"
        (self._folder / name).write_bytes(sheet)
        self._note(name, suite, version, hashlib.sha256(sheet).hexdigest(), [text for text, found in shown if found])

    def _note(self, name: str, suite: str, version: int, digest: str, texts: Sequence[str]) -> None:
        path = self._folder / SHEETS_FILE
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        rows = [row for row in rows if row["file"] != name]
        rows.append({"file": name, "suite": suite, "version": version, "sha256": digest, "prompts": list(texts)})
        write_atomically(path, json.dumps(rows, indent=1, ensure_ascii=False))

    def _pictures(self, scored: ScoredPrompt) -> list[bytes]:
        """The first picture of each response."""
        if scored.generated is None:
            return []
        what = f"the pictures of {scored.prompt.prompt_id}"
        [found] = fetch([scored.generated.to_score], timeout_s=self._timeout_s, what=what)
        if isinstance(found, Answers):
            responses = found.responses
        else:
            assert isinstance(found, TrajectoryGroup), f"{what} are a {type(found).__name__}"
            responses = tuple(trajectory.response for trajectory in found.trajectories)
        return [response.pictures[0] for response in responses if response.pictures]


def joined(pictures: Sequence[bytes], columns: int) -> bytes:
    """One PNG of pictures of one size, row by row."""
    tiles = [_tile(picture) for picture in pictures]
    width, height = (max(tile.size[axis] for tile in tiles) + GAP for axis in (0, 1))
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (width * min(columns, len(tiles)) + GAP, height * rows + GAP), (90, 90, 90))
    for place, tile in enumerate(tiles):
        sheet.paste(tile, (GAP + place % columns * width, GAP + place // columns * height))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _tile(picture: bytes) -> Image.Image:
    with Image.open(io.BytesIO(picture)) as opened:
        tile = opened.convert("RGB")
    factor = -(-SMALL // max(tile.size))
    if factor > 1:
        return tile.resize((tile.width * factor, tile.height * factor), Image.Resampling.NEAREST)
    tile.thumbnail((SIDE, SIDE))
    return tile
