"""ImagePairProcessor: turns rows of image pairs into groups of encoded prompts and latents."""

from __future__ import annotations

import numpy as np

from mobula.actors.datasets.conversations import CHOSEN, REJECTED
from mobula.actors.datasets.preferences.image_pairs import ImagePair
from mobula.actors.datasets.rows import Row
from mobula.actors.processors.flow import FlowProcessor
from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.trajectory import (
    FinishReason,
    Response,
    Reward,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)


class ImagePairProcessor:
    """Builds a group from each row: two trajectories of one step that ends in an image; rewards are the labels.

    `behavior_logprobs` are 0, because no policy sampled the images.
    """

    media_token_ids: tuple[int, ...] = ()
    template_token_ids: tuple[int, ...] = ()

    def __init__(self, flow: FlowProcessor) -> None:
        self._flow = flow

    def prepare(self, row: ImagePair, prompt_id: str) -> ScoredGroup:
        """Builds the group of a row.

        Raises:
            PromptError: an image or file of latents cannot be used.
        """
        prompt = self._flow.prepare(_asked(row), prompt_id)
        paths = (row.chosen, row.rejected)
        trajectories = tuple(_trajectory(f"{prompt_id}#{n}", self._flow.latents(path)) for n, path in enumerate(paths))
        group = TrajectoryGroup(prompt, trajectories)
        return ScoredGroup(group.summary(), group, (Reward(CHOSEN), Reward(REJECTED)))

    def num_media(self, row: ImagePair) -> int:
        """Number of encoded texts."""
        return self._flow.num_media(_asked(row))

    def check(self, row: ImagePair) -> int:
        """0: a prompt has no tokens.

        Raises:
            PromptError: as `prepare`.
        """
        for path in (row.chosen, row.rejected):
            self._flow.latents(path)
        return self._flow.check(_asked(row))


def _asked(row: ImagePair) -> Row:
    return Row(row.sample_id, row.question, "", "")


def _trajectory(name: str, latents: np.ndarray) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        actions=LatentActions.of_image(latents),
        behavior_logprobs=np.zeros(1, dtype=np.float32),
        action_mask=np.ones(1, dtype=bool),
        weight_spans=(WeightSpan(0, 0, 1),),
        finish_reason=FinishReason.STOP,
        response=Response("", 1, False),
    )
