"""Sample a group and score it; a group that is lost with its node before that is sampled again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from cluster.errors import LostObjectError, RolloutError, UnscoredGroupError
from cluster.records.trajectory import Generated, Prompt, Reward
from cluster.roles import Rewards, Rollouts, SamplingSettings

_logger = logging.getLogger(__name__)


MAX_NODES_LOST = 8  # in a row, over one prompt or one step


async def sample_and_score(
    rollouts: Rollouts, rewards: Rewards, prompt: Prompt, settings: SamplingSettings, *, on_lost: Callable[[str], None]
) -> tuple[Generated, Sequence[Reward | None]]:
    """A group of `prompt` and its rewards. A group that cannot be scored has no rewards.

    A group that is lost with its node before it is scored is sampled again; `on_lost` is called for each.

    Raises:
        RolloutError: `MAX_NODES_LOST` groups were lost.
    """
    for _ in range(MAX_NODES_LOST):
        generated = await rollouts.generate(prompt, settings)
        try:
            return generated, await rewards.score(generated.to_score, prompt.prompt_id)
        except UnscoredGroupError as error:
            _logger.warning("prompt %s has no reward: %s", prompt.prompt_id, error)
            return generated, [None] * generated.summary.num_trajectories
        except LostObjectError as error:
            _logger.warning("prompt %s is sampled again: %s", prompt.prompt_id, error)
            on_lost(type(error).__name__)
    raise RolloutError(
        f"prompt {prompt.prompt_id} was sampled {MAX_NODES_LOST} times, and each group was lost with its node before "
        "it was scored: see which nodes come and go, then go on with resume=auto"
    )
