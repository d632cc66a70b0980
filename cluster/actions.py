"""What the policy did, exactly as the engine did it. Only Processor, Sampler and Policy look inside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenActions:
    """The tokens that the engine sampled after an expanded prompt.

    `token_ids` are the engine's own ids, never decoded and tokenised again. The prompt they follow is the group's
    `Prompt.expanded_ids`.
    """

    token_ids: np.ndarray  # int32 [T]

    @property
    def num_steps(self) -> int:
        return int(self.token_ids.shape[0])
