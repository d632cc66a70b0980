"""EpisodeActor: a rollout actor whose responses are episodes with an environment."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace

from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.actor import RolloutActor
from mobula.actors.rollout.episodes import EpisodeRunner
from mobula.actors.samplers.base import EngineSettings
from mobula.cluster.records.media import MediaStore
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import GroupReport, Prompt, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.configs.schema.data import DataConfig
from mobula.configs.schema.environment import EnvironmentConfig
from mobula.configs.schema.rollout import SamplerConfig


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings of episodes, in addition to the engine's; equal for all actors of a run."""

    environment: EnvironmentConfig
    data: DataConfig
    sampler: SamplerConfig
    keeps_files: bool  # of images, for reward functions


class EpisodeActor(RolloutActor):
    """Samples episodes.

    A group contains each image of its observations once: objects of an actor in the object store are lost with it.
    """

    def __init__(
        self, sampler: str, settings: EngineSettings, episodes: EpisodeSettings, *, object_timeout_s: float
    ) -> None:
        super().__init__(sampler, settings, object_timeout_s=object_timeout_s)
        store = MediaStore(lambda media: media, episodes.data.media_cache_bytes)
        chat = ChatProcessor(
            settings.model,
            episodes.data,
            episodes.sampler,
            store,
            keep_files=episodes.keeps_files,
            device=settings.device,
        )
        self._episodes = EpisodeRunner(
            episodes.environment,
            chat,
            self._sampler,
            self._media,
            model=settings.model,
            max_images=episodes.sampler.max_images_per_prompt,
        )

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        """Plays one episode per sibling; continues the turns of an earlier attempt."""
        failures: Counter[str] = Counter()
        group = await self._episodes.generate(
            prompt, settings, attempt, report=self.report, note_failure=lambda kind: failures.update([kind])
        )
        return group, (replace(group.summary(), failures=dict(failures)), group.small_responses())

    async def close(self) -> None:
        await asyncio.to_thread(self._episodes.close)
        await super().close()
