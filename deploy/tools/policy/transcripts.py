"""Transcripts of episodes: turns, images and rewards as JSON with images beside it, and as one page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader

from mobula.cluster.metrics.files import write_atomically
from mobula.cluster.metrics.step_records import strict
from mobula.cluster.records.media import MediaHandle
from mobula.cluster.records.trajectory import Prompt, Reward, Trajectory

JSON_FILE, PAGE_FILE, IMAGES = "transcripts.json", "transcripts.html", "images"
TEMPLATE = "transcripts.html.j2"


@dataclass(frozen=True)
class TranscriptTurn:
    """One turn: what the policy wrote, what followed, and what was paid for it."""

    action: str
    observation: str
    images: tuple[str, ...]  # of the observation; their names
    rewards: Mapping[str, float]
    status: str  # of its tool calls


@dataclass(frozen=True)
class Transcript:
    """One episode, or one answer of a task without an environment. `reward` is None where it could not be scored."""

    prompt_id: str
    sample_id: str
    seed: int
    prompt: str
    images: tuple[str, ...]
    references: tuple[str, ...]
    turns: tuple[TranscriptTurn, ...]
    finish_reason: str
    failure: str
    num_tokens: int
    reward: float | None
    components: Mapping[str, float]
    reasons: Mapping[str, str]
    seconds: float


class TranscriptWriter:
    """Collects transcripts. `thumbnails` has the images (PNG) of prompts and observations by their keys."""

    def __init__(self, thumbnails: Mapping[str, bytes]) -> None:
        self._thumbnails = thumbnails
        self._transcripts: list[Transcript] = []
        self._images: dict[str, bytes] = {}  # by the names of their files

    def add(
        self,
        prompt: Prompt,
        trajectory: Trajectory,
        reward: Reward | None,
        *,
        seed: int,
        seconds: float,
    ) -> None:
        response = trajectory.response
        self._transcripts.append(
            Transcript(
                prompt_id=prompt.prompt_id,
                sample_id=prompt.sample_id,
                seed=seed,
                prompt=prompt.text,
                images=self._named(prompt.media),
                references=tuple(reference for reference in prompt.references if reference),
                turns=self._turns(trajectory),
                finish_reason=trajectory.finish_reason.value,
                failure=response.failure,
                num_tokens=response.num_tokens,
                reward=None if reward is None else reward.value,
                components={} if reward is None else dict(reward.components),
                reasons={} if reward is None else dict(reward.reasons),
                seconds=round(seconds, 3),
            )
        )

    def write(self, folder: Path, summary: Mapping[str, Any]) -> None:
        """Write `transcripts.json`, `transcripts.html` and the folder `images`."""
        (folder / IMAGES).mkdir(parents=True, exist_ok=True)
        for name, content in self._images.items():
            (folder / IMAGES / name).write_bytes(content)
        episodes = [asdict(transcript) for transcript in self._transcripts]
        document = strict({"summary": dict(summary), "episodes": episodes})
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(folder / JSON_FILE, text + "\n")
        write_atomically(folder / PAGE_FILE, self._page(summary))

    def _turns(self, trajectory: Trajectory) -> tuple[TranscriptTurn, ...]:
        response = trajectory.response
        if not response.turns:
            return (TranscriptTurn(response.text, "", (), {}, "none"),)
        return tuple(
            TranscriptTurn(turn.action, turn.observation, self._named(media), dict(turn.rewards), turn.status)
            for turn, media in zip(response.turns, trajectory.turn_media, strict=True)
        )

    def _named(self, handles: Sequence[MediaHandle]) -> tuple[str, ...]:
        names = []
        for handle in handles:
            name = f"{handle.key[:32]}.png"
            self._images[name] = self._thumbnails[handle.key]
            names.append(name)
        return tuple(names)

    def _page(self, summary: Mapping[str, Any]) -> str:
        inlined = {name: base64.b64encode(content).decode("ascii") for name, content in self._images.items()}
        templates = Templates(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
        return templates.get_template(TEMPLATE).render(summary=summary, transcripts=self._transcripts, images=inlined)
