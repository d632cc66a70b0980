"""ResponseFiles: writes the responses of evaluations as JSONL, one file per suite and version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from mobula.cluster.metrics.files import write_atomically
from mobula.cluster.records.trajectory import Answers, Response, TrajectoryGroup
from mobula.cluster.rollout.evaluation import ScoredPrompt
from mobula.cluster.runtime.object_store import fetch


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
        responses = self._responses(scored)
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

    def _responses(self, scored: ScoredPrompt) -> list[Response]:
        if scored.generated is None:
            return []
        what = f"the responses to {scored.prompt.prompt_id}"
        [group] = fetch([scored.generated.to_score], timeout_s=self._timeout_s, what=what)
        if isinstance(group, Answers):
            return list(group.responses)
        assert isinstance(group, TrajectoryGroup), f"{what} are a {type(group).__name__}"
        return [trajectory.response for trajectory in group.trajectories]
