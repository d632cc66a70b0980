"""Input rows of a flow policy: the denoising steps of some trajectories, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.media import MediaHandle, MediaSpan, ProcessedMedia
from mobula.cluster.records.trajectory import Prompt
from mobula.learner.policies.device_copies import on_device

CONDITION = "condition"  # modality of a medium that holds an encoded prompt
WHERE = MediaSpan(0, 0)  # of a condition: it stands at no token


class Reader(Protocol):
    """Source of conditions: a `MediaReader`, or media in memory."""

    def read(self, handles: Sequence[MediaHandle]) -> list[ProcessedMedia]: ...


@dataclass(frozen=True)
class LatentSequence:
    """One row: all denoising steps of a trajectory are scored.

    `media` are the encoded prompt and, with guidance, the encoded negative prompt.
    """

    actions: LatentActions
    media: tuple[MediaHandle, ...]
    old: np.ndarray | None = None  # float32 [T, ...]: means of the steps, of the weights that a step trains from

    @classmethod
    def of_response(cls, prompt: Prompt, actions: LatentActions) -> LatentSequence:
        """A prompt and how one image of it was denoised.

        Raises:
            ValueError: the prompt has other media than one or two conditions.
        """
        return cls(actions, condition_of(prompt))

    @property
    def num_targets(self) -> int:
        return self.actions.num_steps

    @property
    def num_tokens(self) -> int:
        """Positions of the latent image in all steps: the row's share of `learner.tokens_per_microbatch`."""
        return self.num_targets * int(np.prod(self.actions.latents.shape[2:]))

    @property
    def num_prompt_tokens(self) -> int:
        """0: latents have no tokens in common."""
        return 0

    @property
    def answers(self) -> tuple[int, ...]:
        return (self.num_tokens,)

    @property
    def num_media_tokens(self) -> int:
        """0: conditions come encoded."""
        return 0

    @property
    def num_predictions(self) -> int:
        return self.num_targets

    def with_old(self, old: np.ndarray) -> LatentSequence:
        return replace(self, old=old)


def condition_of(prompt: Prompt) -> tuple[MediaHandle, ...]:
    """The encoded prompt and, with guidance, the encoded negative prompt.

    Raises:
        ValueError: the prompt has other media.
    """
    kinds = [handle.modality for handle in prompt.media]
    if kinds not in ([CONDITION], [CONDITION, CONDITION]):
        raise ValueError(
            f"prompt {prompt.prompt_id} has the media {kinds}: denoising steps need its encoded text, and with "
            "guidance that of the negative prompt"
        )
    return prompt.media


@dataclass(frozen=True)
class LatentBatch:
    """B rows of at most T steps, N steps in all, in the order of `target_mask`."""

    latents: Tensor  # float32 [N, ...]: before each step
    next_latents: Tensor  # float32 [N, ...]: after each step
    timesteps: Tensor  # float32 [N]
    sigmas: Tensor  # float32 [N]: noise levels before each step
    next_sigmas: Tensor  # float32 [N]: and after it
    max_sigmas: Tensor  # float32 [N]: the second level of the schedule, see `mobula.learner.policies.sde`
    target_mask: Tensor  # bool [B, T]: False behind a row's last step
    target_rows: Tensor  # int64 [N]: where they are in [B, T]
    target_columns: Tensor  # int64 [N]
    conditions: dict[str, Tensor]  # forward() argument -> all unique conditions along axis 0
    condition_rows: Tensor  # int64 [N]: the condition of each step
    negative_rows: Tensor | None  # int64 [N]: its negative prompt; None without guidance
    old_means: Tensor | None = None  # float32 [N, ...]

    def padded(self, values: Tensor) -> Tensor:
        """[N] of the steps -> [B, T], 0 or False behind a row's last step; by index, as in `TokenBatch.padded`."""
        return values.new_zeros(self.target_mask.shape).index_put((self.target_rows, self.target_columns), values)


def collate_latents(sequences: Sequence[LatentSequence], reader: Reader, device: torch.device) -> LatentBatch:
    """Concatenates the steps of all rows and resolves their conditions; each unique condition is read once."""
    handles = list({handle.key: handle for s in sequences for handle in s.media}.values())
    media = reader.read(handles)
    indices = {handle.key: index for index, handle in enumerate(handles)}
    num_steps = np.array([s.num_targets for s in sequences])
    of_step = np.repeat([indices[s.media[0].key] for s in sequences], num_steps)
    has_negatives = len(sequences[0].media) == 2
    negatives = np.repeat([indices[s.media[-1].key] for s in sequences], num_steps) if has_negatives else None
    target_mask = np.arange(max(1, num_steps.max())) < num_steps[:, None]
    rows, columns = np.nonzero(target_mask)
    actions = [s.actions for s in sequences]
    latents = [a.values for a in actions]
    old = [s.old for s in sequences if s.old is not None]

    def column(arrays: list[np.ndarray]) -> Tensor:
        return on_device(np.concatenate(arrays).astype(np.float32), device)

    return LatentBatch(
        latents=column([a[:-1] for a in latents]),
        next_latents=column([a[1:] for a in latents]),
        timesteps=column([a.timesteps for a in actions]),
        sigmas=column([a.sigmas[a.step_index] for a in actions]),
        next_sigmas=column([a.sigmas[a.step_index + 1] for a in actions]),
        max_sigmas=column([np.full(a.num_steps, a.sigmas[1]) for a in actions]),
        target_mask=on_device(target_mask, device),
        target_rows=on_device(rows, device),
        target_columns=on_device(columns, device),
        conditions={
            name: on_device(np.concatenate([m.inputs[name] for m in media]), device) for name in media[0].inputs
        },
        condition_rows=on_device(of_step, device),
        negative_rows=None if negatives is None else on_device(negatives, device),
        old_means=column(old) if len(old) == len(sequences) else None,
    )
