"""Roles of a real run that reach the moments of a `Saboteur`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_cores import CoreApart
from sabotage import Saboteur

from mobula.cluster.records.partial_response import Attempt, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import GroupReport, Prompt, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.manifest import Manifest

SABOTAGE = "MOBULA_TEST_SABOTAGE"  # the saboteur's folder, in the environment of every process of the run
CORE = "core"  # the core of the engine that was started last, or that reached `two_pushes` last
ACTOR = "actor"  # its actor


def saboteur() -> Saboteur:
    return Saboteur(Path(os.environ[SABOTAGE]))


class StruckRollout(CoreApart):
    """Things happen while it generates, and while it is in a broadcast."""

    async def start(self) -> None:
        await super().start()
        self._actor, self._core = await self.processes()
        self._reported: dict[str, list[list[int]]] = {}  # request -> tokens of each sibling, with its last report
        self._enlist()

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        generating = asyncio.ensure_future(super().generate(prompt, settings, attempt))
        await asyncio.sleep(0)  # it is with the engine now
        await _beside("generating")
        return await generating

    def _report(self, chunks: Sequence[TokenChunk], siblings: Sequence[SampledSequence]) -> None:
        """The moment `two_pushes`: a response is in its middle that three versions have sampled.

        A victim leaves behind what it had reported before: the tokens that a later attempt must go on from.
        """
        super()._report(chunks, siblings)
        request = chunks[0].request_id
        if any(len(sibling.weight_spans) >= 3 and not sibling.is_finished for sibling in siblings):
            if saboteur().is_planned("two_pushes") and request in self._reported:
                self._enlist()
                prompt = request.partition("~")[0].replace("/", "-")
                saboteur().moment("two_pushes", leaves=(prompt, self._reported[request]))
        self._reported[request] = [sibling.actions.token_ids.tolist() for sibling in siblings]

    def _enlist(self) -> None:
        saboteur().enlist(ACTOR, self._actor)
        saboteur().enlist(CORE, self._core)

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
