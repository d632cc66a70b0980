"""ArtifactWriter: writes images and videos of a policy as files, with an index of hashes and rewards."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.report.samples import INDEX, read_artifacts

if TYPE_CHECKING:
    from mobula.cluster.metrics.step_records import SampleRecord
    from mobula.cluster.records.trajectory import Response, Reward, ScoredGroup, TrajectoryGroup

POSTER_SIDE = 512  # pixels at most


@dataclass(eq=False)
class ArtifactWriter:
    """Writes the images of the first `per_step` responses of a step: the first of each group, then the second of each.

    `<folder>/step-000001/<prompt>-<sibling>.png`, or `.mp4` of several frames with its first frame as `.jpg`;
    `artifacts.jsonl` has a row for each: step, trajectory, prompt, file, sha256, number of frames, reward and
    components, and the poster of a video. A run that resumes from `version` removes later rows.
    """

    folder: Path
    _: KW_ONLY
    per_step: int
    frame_rate: int
    version: int
    fetch: Callable[..., list[Any]]  # `mobula.cluster.runtime.object_store.fetch`
    timeout_s: float

    def __post_init__(self) -> None:
        self._rows = [row for row in read_artifacts(self.folder) if row["step"] <= self.version]

    def offer(self, step: int, groups: Sequence[ScoredGroup]) -> Sequence[SampleRecord]:
        """Writes files of the groups of one step. Returns no samples."""
        chosen = list(islice(_in_turn(groups), self.per_step))
        wanted = list({id(group): group for group, _ in chosen}.values())
        references = [group.group for group in wanted]
        fetched: list[TrajectoryGroup] = self.fetch(references, timeout_s=self.timeout_s, what=f"images of step {step}")
        groups_by_id = {id(group): whole for group, whole in zip(wanted, fetched, strict=True)}
        for group, sibling in chosen:
            trajectory = groups_by_id[id(group)].trajectories[sibling]
            if trajectory.response.images:
                sample_id = group.summary.sample_id
                as_file = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in sample_id)
                name = f"step-{step:06d}/{as_file}-{sibling}"
                row = self._written(name, trajectory.response)
                described = {"step": step, "trajectory_id": trajectory.trajectory_id}
                described["prompt"] = groups_by_id[id(group)].prompt.text
                self._rows.append(described | row | _scores(group.rewards[sibling]))
        write_atomically(self.folder / INDEX, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self._rows))
        return ()

    def _written(self, name: str, response: Response) -> dict[str, object]:
        frames = response.images
        kind, content = (".png", frames[0]) if len(frames) == 1 else (".mp4", as_mp4(frames, self.frame_rate))
        path = self.folder / f"{name}{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        file = path.relative_to(self.folder).as_posix()
        row = {"file": file, "sha256": hashlib.sha256(content).hexdigest(), "num_frames": len(frames)}
        if len(frames) == 1:
            return row
        poster = path.with_suffix(".jpg")
        poster.write_bytes(_poster(frames[0]))
        return row | {"poster": poster.relative_to(self.folder).as_posix()}


def as_mp4(frames: Sequence[bytes], rate: int) -> bytes:
    """Encodes frames (image files of one size with even sides) as H.264 in MP4."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        first = Image.open(io.BytesIO(frames[0]))
        stream.width, stream.height, stream.pix_fmt = first.width, first.height, "yuv420p"
        for frame in frames:
            shown = av.VideoFrame.from_image(Image.open(io.BytesIO(frame)).convert("RGB"))
            container.mux(stream.encode(shown))
        container.mux(stream.encode())
    return file.getvalue()


def _poster(frame: bytes) -> bytes:
    file = io.BytesIO()
    with Image.open(io.BytesIO(frame)) as opened:
        image = opened.convert("RGB")
    image.thumbnail((POSTER_SIDE, POSTER_SIDE))
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def refuse_without_encoder() -> None:
    if find_spec("av") is None:
        raise ValueError(
            "metrics.artifacts_per_step writes videos with PyAV, which is not installed: pip install mobula[video], or "
            "set metrics.artifacts_per_step=0"
        )


def _in_turn(groups: Sequence[ScoredGroup]) -> Iterator[tuple[ScoredGroup, int]]:
    """Yields the first sibling of each group, then the second of each."""
    most = max((len(group.rewards) for group in groups), default=0)
    return ((group, sibling) for sibling in range(most) for group in groups if sibling < len(group.rewards))


def _scores(reward: Reward | None) -> dict[str, object]:
    if reward is None:
        return {"reward": None, "components": {}}
    return {"reward": reward.value, "components": dict(reward.components)}
