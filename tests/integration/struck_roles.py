"""Roles of a real run in which somebody reaches the moments of a `Saboteur`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from core_apart import CoreApart
from sabotage import Saboteur

from cluster.roles import SamplingSettings
from cluster.sampled import Attempt
from cluster.trajectory import Prompt, Told, TrajectoryGroup
from cluster.weight_sync.manifest import Manifest

SABOTAGE = "MOBULA_TEST_SABOTAGE"  # the saboteur's folder, in the environment of every process of the run
CORE = "core"  # the core of the engine that was started last


def saboteur() -> Saboteur:
    return Saboteur(Path(os.environ[SABOTAGE]))


class StruckRollout(CoreApart):
    """Things happen while it generates, and while it is in a broadcast."""

    async def start(self) -> None:
        await super().start()
        _, core = await self.processes()
        saboteur().enlist(CORE, core)

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, Told]:
        generating = asyncio.ensure_future(super().generate(prompt, settings, attempt))
        await asyncio.sleep(0)  # it is with the engine now
        await _beside("generating")
        return await generating

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        receiving = asyncio.ensure_future(super().receive_weights(manifest, bucket_bytes, version))
        await asyncio.sleep(0)
        await _beside("in_broadcast")
        return await receiving


def score(request: Any, **options: Any) -> float:
    """A reward during which things happen; it differs between siblings."""
    saboteur().moment("scoring")
    return float(len(request.response.text) % 2)


async def _beside(moment: str) -> None:
    await asyncio.to_thread(saboteur().moment, moment)
