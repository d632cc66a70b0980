"""Videos that a policy made in the first and in the last step that left some, as a run's report shows them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ARTIFACTS_FOLDER = "artifacts"  # of the run folder
INDEX = "artifacts.jsonl"  # in it: a row for each picture or video
MAX_VIDEOS = 4  # of a step
MAX_BYTES = 4 << 20  # of a video in the report; of a larger one only the file is named


@dataclass(frozen=True)
class Video:
    """One video."""

    file: str  # below the run folder
    prompt: str
    reward: float | None
    sha256: str
    poster: bytes  # JPEG of the first frame
    mp4: bytes | None


def read_artifacts(folder: Path) -> list[dict[str, object]]:
    """The rows of artifacts.jsonl; empty if there is none."""
    path = folder / INDEX
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def read_videos(run_folder: Path) -> list[tuple[int, list[Video]]]:
    """(step, its videos) of the first and of the last step.

    Raises:
        ValueError: the content of a file differs from what was written.
    """
    rows = [row for row in read_artifacts(run_folder / ARTIFACTS_FOLDER) if "poster" in row]
    steps = sorted({int(str(row["step"])) for row in rows})
    chosen = steps if len(steps) == 1 else [steps[0], steps[-1]] if steps else []
    return [(step, _videos(run_folder, [row for row in rows if row["step"] == step])) for step in chosen]


def _videos(run_folder: Path, rows: Sequence[dict[str, object]]) -> list[Video]:
    return [_video(run_folder, row) for row in rows[:MAX_VIDEOS]]


def _video(run_folder: Path, row: dict[str, object]) -> Video:
    folder = run_folder / ARTIFACTS_FOLDER
    mp4 = (folder / str(row["file"])).read_bytes()
    digest = hashlib.sha256(mp4).hexdigest()
    if digest != row["sha256"]:
        raise ValueError(
            f"{folder / str(row['file'])} has the SHA-256 {digest}, and {row['sha256']} was written: put the file of "
            f"the run back, or remove its row from {INDEX}"
        )
    reward = row["reward"]
    return Video(
        file=f"{ARTIFACTS_FOLDER}/{row['file']}",
        prompt=str(row["prompt"]),
        reward=None if reward is None else float(str(reward)),
        sha256=digest,
        poster=(folder / str(row["poster"])).read_bytes(),
        mp4=mp4 if len(mp4) <= MAX_BYTES else None,
    )
