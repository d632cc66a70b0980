"""Converts groups of an offline job to micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.records.actions import LatentActions, TokenActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt, ScoredGroup, TrajectoryGroup
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.cluster.runtime.seeds import derived_seed
from mobula.learner.policies.base import PolicyRow, RowOutline
from mobula.learner.policies.batch import PADDING_ID, TokenSequence, pad_rows
from mobula.learner.policies.device_copies import on_device
from mobula.learner.policies.flow.noising import CleanSequence, Noising
from mobula.learner.policies.trained import PolicyBatch, collate_rows

T = TypeVar("T")
Row = Callable[[Prompt, Any], PolicyRow]
"""A prompt and the actions of an ending -> what a model reads of them, and where."""


class Outlined(Protocol):
    """Interface of an example that `ExampleOutline` summarises."""

    @property
    def sequence(self) -> PolicyRow: ...

    @property
    def group(self) -> int | None:
        """A key of the prompt; None for images."""
        ...

    @property
    def num_trained(self) -> int:
        """Trained tokens."""
        ...

    @property
    def labels(self) -> tuple[float, ...]: ...


@dataclass(frozen=True)
class Candidate:
    """One ending of a row."""

    sequence: PolicyRow
    mask: np.ndarray  # bool [T]: True on the assistant's tokens
    label: float
    reference_logprobs: np.ndarray | None  # float32 [T]


@dataclass(frozen=True)
class Example:
    """One row of an offline job, all of whose candidates are in one micro-batch: the highest label first."""

    candidates: tuple[Candidate, ...]
    num_prompt_tokens: int  # with which all candidates begin; 0 for images
    is_trained: bool = True

    @property
    def group(self) -> int | None:
        """A key of the prompt: examples with the same prompt compute it once."""
        first = self.candidates[0].sequence
        return first.prefix_key(self.num_prompt_tokens) if isinstance(first, TokenSequence) else None

    @property
    def labels(self) -> tuple[float, ...]:
        return tuple(candidate.label for candidate in self.candidates)

    @property
    def num_trained(self) -> int:
        """Trained tokens of all candidates."""
        return sum(int(candidate.mask.sum()) for candidate in self.candidates)

    @property
    def sequence(self) -> PolicyRow:
        """The example's size in a micro-batch, of all its candidates."""
        first, prompt = self.candidates[0].sequence, self.num_prompt_tokens
        answers = tuple(candidate.sequence.num_tokens - prompt for candidate in self.candidates)
        return RowOutline(first.num_targets, prompt, answers, first.num_media_tokens, first.media)

    def compared(self, predicted: np.ndarray) -> Example:
        """Images with what the initial weights predict of all candidates, float32 [N, ...] one after the other."""
        parts = np.split(predicted, len(self.candidates))
        candidates = []
        for candidate, part in zip(self.candidates, parts, strict=True):
            assert isinstance(candidate.sequence, CleanSequence), "velocities are those of images"
            candidates.append(replace(candidate, sequence=candidate.sequence.with_old(part)))
        return replace(self, candidates=tuple(candidates))

    def referred(self, logprobs: Sequence[np.ndarray]) -> Example:
        """The same with the log-probs of the initial policy, float32 [at least T] a candidate."""
        rows = zip(self.candidates, logprobs, strict=True)
        return replace(
            self, candidates=tuple(replace(c, reference_logprobs=found[: len(c.mask)].copy()) for c, found in rows)
        )

    def untrained(self) -> Example:
        """Returns the example without trained tokens."""
        masked = tuple(replace(candidate, mask=np.zeros_like(candidate.mask)) for candidate in self.candidates)
        return replace(self, candidates=masked, is_trained=False)


@dataclass(frozen=True)
class ExampleOutline:
    """An example that another rank has: its size, by which rows are shared out, and what the totals of a step count."""

    index: int  # its place among the examples of the step
    sequence: RowOutline
    num_trained: int
    labels: tuple[float, ...]
    group: int | None = None

    @classmethod
    def of(cls, example: Outlined, index: int) -> ExampleOutline:
        return cls(index, RowOutline.of(example.sequence), example.num_trained, example.labels, example.group)

    def untrained(self) -> ExampleOutline:
        return self


SharedExample = Example | ExampleOutline
"""An example as a rank has it: whole if it takes it through the model."""


@dataclass(frozen=True)
class ExampleTotals:
    """Counts of a whole step, or of all that is assessed."""

    num_examples: int
    num_tokens: int  # of the assistant, in all candidates
    mean_label: float


@dataclass(frozen=True)
class ExampleBatch:
    """A micro-batch of E examples, whose B candidates follow each other."""

    tokens: PolicyBatch
    mask: Tensor  # bool [B, T]
    labels: Tensor  # float32 [B]
    is_trained: Tensor  # bool [E]
    reference_logprobs: Tensor | None  # float32 [B, T]


def answer_row(prompt: Prompt, actions: TokenActions) -> TokenSequence:
    """The ending is scored, token by token."""
    return TokenSequence.of_response(prompt, actions.token_ids)


def image_row(noising: Noising, prompt: Prompt, actions: LatentActions) -> CleanSequence:
    """The image is scored at noise levels that all candidates of the row share, other ones in every epoch."""
    seed = derived_seed(0, prompt.prompt_id)
    return replace(CleanSequence.of_response(noising, prompt, actions), seed=seed)


def end_row(prompt: Prompt, actions: TokenActions) -> TokenSequence:
    """The one target stands behind the last token, so a model is read at the state of that token."""
    whole = TokenSequence.of_response(prompt, actions.token_ids)
    return replace(whole, token_ids=np.append(whole.token_ids, PADDING_ID), num_context=whole.num_tokens)


def fetch_examples(groups: Sequence[ScoredGroup], row: Row, timeout_s: float) -> list[Example]:
    """One example a group; media stay where they are."""
    fetched: list[TrajectoryGroup] = fetch_or_miss([g.group for g in groups], timeout_s=timeout_s, what="rows")
    references = fetch_or_miss([g.reference_logprobs for g in groups], timeout_s=timeout_s, what="reference log-probs")
    examples = []
    for group, scored, logprobs in zip(fetched, groups, references, strict=True):
        rewards = [reward for reward in scored.rewards if reward is not None]  # rows of data sets have them all
        candidates = [
            Candidate(
                sequence=row(group.prompt, trajectory.actions),
                mask=trajectory.action_mask,
                label=reward.value,
                reference_logprobs=None if logprobs is None else logprobs[n],
            )
            for n, (trajectory, reward) in enumerate(zip(group.trajectories, rewards, strict=True))
        ]
        num_prompt_tokens = group.prompt.num_tokens if isinstance(candidates[0].sequence, TokenSequence) else 0
        examples.append(Example(tuple(sorted(candidates, key=lambda candidate: -candidate.label)), num_prompt_tokens))
    return examples


def totals_of(examples: Sequence[SharedExample]) -> ExampleTotals:
    """The denominators of a step."""
    labels = [label for example in examples for label in example.labels]
    return ExampleTotals(
        num_examples=len(examples),
        num_tokens=sum(example.num_trained for example in examples),
        mean_label=sum(labels) / len(labels),
    )


def all_whole(examples: Sequence[object], kind: type[T]) -> list[T]:
    """Returns the examples; asserts that none is an outline."""
    whole = [example for example in examples if isinstance(example, kind)]
    assert len(whole) == len(examples), "an example of another rank: no content of it was fetched"
    return whole


def collate_examples(examples: Sequence[SharedExample], reader: MediaReader, device: torch.device) -> ExampleBatch:
    """Pad the candidates of some examples, all of them whole, into one micro-batch."""
    whole = all_whole(examples, Example)
    candidates = [candidate for example in whole for candidate in example.candidates]
    references = [c.reference_logprobs for c in candidates if c.reference_logprobs is not None]
    return ExampleBatch(
        tokens=collate_rows([candidate.sequence for candidate in candidates], reader, device),
        mask=_column([candidate.mask for candidate in candidates], np.bool_, device),
        labels=torch.tensor([candidate.label for candidate in candidates], dtype=torch.float32, device=device),
        is_trained=torch.tensor([example.is_trained for example in whole], device=device),
        reference_logprobs=_column(references, np.float32, device) if len(references) == len(candidates) else None,
    )


def _column(rows: Sequence[np.ndarray], dtype: type, device: torch.device) -> Tensor:
    return on_device(pad_rows(rows, 0, dtype), device)
