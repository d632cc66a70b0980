"""Examples that the learner trains on: entries, batches and the supervised term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.records.actions import LatentActions, TokenActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt, ScoredGroup, TrajectoryGroup
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.cluster.runtime.seeds import derived_seed
from mobula.configs.schema import RunConfig
from mobula.learner import shares
from mobula.learner.algorithms.policy_losses import Totals
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.policies.base import PolicyRow, RowOutline
from mobula.learner.policies.batch import PADDING_ID, TokenSequence, column
from mobula.learner.policies.flow.policy import CleanSequence, Noising
from mobula.learner.policies.trained import PolicyBatch, collate_rows

Row = Callable[[Prompt, Any], PolicyRow]
"""A prompt and the actions of an ending -> what a model reads of them, and where."""


@dataclass(frozen=True)
class Candidate:
    """One ending of a row."""

    sequence: PolicyRow
    mask: np.ndarray  # bool [T]: True on the assistant's tokens
    label: float
    reference_logprobs: np.ndarray | None  # float32 [T]


@dataclass(frozen=True)
class Example:
    """One row of an offline job or of the warm start, all of whose candidates are in one micro-batch: the highest label
    first."""

    candidates: tuple[Candidate, ...]
    num_prompt_tokens: int  # with which all candidates begin; 0 for images
    is_trained: bool = True

    @classmethod
    def of_answer(cls, prompt: Prompt, actions: TokenActions, mask: np.ndarray) -> Example:
        """A prompt and its correct answer with EOS, or a whole episode; `mask`, bool [A], is True where a token is
        trained. Prompt and vision tokens are never trained on."""
        row = TokenSequence.of_actions(prompt, replace(actions, kept=None))  # answers are no samples
        return cls((Candidate(row, mask, 0.0, None),), prompt.num_tokens)

    @classmethod
    def of_image(cls, sequence: CleanSequence) -> Example:
        """An image and the noise levels to train on."""
        return cls((Candidate(sequence, np.ones(1, dtype=bool), 0.0, None),), 0)

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
    def of(cls, example: SharedExample, index: int) -> ExampleOutline:
        return cls(index, RowOutline.of(example.sequence), example.num_trained, example.labels, example.group)

    def untrained(self) -> ExampleOutline:
        return self


SharedExample = Example | ExampleOutline  # an example as a rank has it: whole if it takes it through the model


@dataclass(frozen=True)
class ExampleTotals(Totals):
    """Counts of a whole step, or of all that is assessed: the assistant's tokens in all candidates, and examples."""

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
    return replace(CleanSequence.of_response(noising, prompt, actions), seed=derived_seed(0, prompt.prompt_id))


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
        num_tokens=sum(example.num_trained for example in examples),
        num_sequences=len(examples),
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
        mask=column([candidate.mask for candidate in candidates], np.bool_, device),
        labels=torch.tensor([candidate.label for candidate in candidates], dtype=torch.float32, device=device),
        is_trained=torch.tensor([example.is_trained for example in whole], device=device),
        reference_logprobs=column(references, np.float32, device) if len(references) == len(candidates) else None,
    )


Parts = Sequence[Sequence[ScoredGroup]]
T = TypeVar("T")


class _Examples:
    """Implements `Entries` for examples. `sizes` are the sizes of the parts: each part is one pass and is assigned to
    ranks separately. `portion` has the references of this rank, if the examples have none."""

    kind = shares.GROUPS

    def __init__(self, sizes: Sequence[int], config: RunConfig, portion: shares.Portion | None) -> None:
        self._sizes = sizes
        self._config = config
        self.is_planned = portion is not None and not portion.is_final

    def __len__(self) -> int:
        return sum(self._sizes)

    def in_parts(self, examples: Sequence[T]) -> list[list[T]]:
        remaining = iter(examples)
        return [[next(remaining) for _ in range(size)] for size in self._sizes]

    def wanted(self, entries: Sequence[SharedExample], num_ranks: int) -> list[set[int]]:
        """For each rank, the indices of its examples, including padding rows."""
        wanted: list[set[int]] = [set() for _ in range(num_ranks)]
        for part in filter(None, self.in_parts([ExampleOutline.of(entry, n) for n, entry in enumerate(entries)])):
            for own, found in zip(wanted, shares_of_ranks(part, self._config.learner, num_ranks), strict=True):
                own.update(outline.index for share in found for outline in share)
        return wanted

    def outline(self, entry: SharedExample, index: int) -> ExampleOutline:
        return ExampleOutline.of(entry, index)

    def restored(self, outline: ExampleOutline) -> SharedExample:
        return outline


class DataRows(_Examples):
    """Implements `mobula.learner.shares.Entries` for dataset rows.

    Example:
        rows = DataRows([first, second], config, answer_row)
        first, second = rows.in_parts(shares.fetch(rows))
    """

    def __init__(
        self,
        parts: Parts,
        config: RunConfig,
        row: Row,
        portion: shares.Portion | None = None,
        kind: str = shares.GROUPS,
    ) -> None:
        super().__init__([len(part) for part in parts], config, portion)
        self.kind = kind
        self._rows = shares.with_portion([row for part in parts for row in part], portion)
        self._row = row

    def expected(self) -> list[SharedExample]:
        return [_expected(row, index, self._row) for index, row in enumerate(self._rows)]

    def fetch(self, indices: Sequence[int]) -> list[SharedExample]:
        assert all(self._rows[n].group is not shares.ELSEWHERE for n in indices), "rows without references on this rank"
        return [*fetch_examples([self._rows[n] for n in indices], self._row, self._config.timeouts.object_s)]


@dataclass(frozen=True)
class StoredExample:
    """A warm-start example in the object store."""

    outline: ExampleOutline
    content: Any  # the example, or a reference to it


def stored_examples(examples: Sequence[SharedExample], put: Callable[[Any], Any]) -> list[StoredExample]:
    """Stores the examples of one pass; `put` returns a reference that `cluster.runtime.object_store.fetch` resolves."""
    return [StoredExample(ExampleOutline.of(example, n), put(example)) for n, example in enumerate(examples)]


class TaughtExamples(_Examples):
    """Implements `learner.shares.share_fetcher.Entries` for warm-start examples, which have exact sizes."""

    def __init__(
        self, stored: Sequence[StoredExample], config: RunConfig, portion: shares.Portion | None = None
    ) -> None:
        super().__init__([len(stored)], config, portion)
        references = {} if portion is None else portion.references
        self._stored = [
            replace(one, content=references[n][0]) if n in references else one for n, one in enumerate(stored)
        ]

    def expected(self) -> list[SharedExample]:
        return [example.outline for example in self._stored]

    def fetch(self, indices: Sequence[int]) -> list[SharedExample]:
        contents = [self._stored[n].content for n in indices]
        assert all(content is not shares.ELSEWHERE for content in contents), "examples without references on this rank"
        return fetch_or_miss(contents, timeout_s=self._config.timeouts.object_s, what="examples of the warm start")


def rows_planner(config: RunConfig, row: Row, part_size: int | None = None) -> shares.Planner:
    """Returns the planner of dataset rows: each rank fetches first what the summaries assign to it.

    Args:
        part_size: rows of each pass; None: all rows are one pass.
    """
    return shares.planned_by(lambda rows, _: DataRows(parts_of(rows, part_size or len(rows)), config, row))


def parts_of(rows: Sequence[ScoredGroup], size: int) -> list[Sequence[ScoredGroup]]:
    return [rows[n : n + size] for n in range(0, len(rows), size)]


def portions_of_examples(
    stored: Sequence[StoredExample], num_ranks: int, *, config: RunConfig
) -> tuple[list[StoredExample], list[shares.Portion]]:
    """Returns the examples without references, and the references of each rank, which follow from exact sizes."""
    held, _ = shares.planned_shares(TaughtExamples(stored, config), num_ranks)
    portions = [shares.Portion({n: (stored[n].content, None) for n in sorted(own)}, is_final=True) for own in held]
    return [replace(one, content=shares.ELSEWHERE) for one in stored], portions


def _expected(row: ScoredGroup, index: int, row_of: Row) -> ExampleOutline:
    """Predicts an example's size from its summary, to assign the row to a rank. It is exact, but for the key of the
    prompt and for images."""
    summary = row.summary
    num_targets = max(summary.num_steps)
    sequence = RowOutline.of_summary(summary, num_targets, summary.num_steps)
    sequence = sequence.with_end() if row_of is end_row else sequence
    return ExampleOutline(index, sequence, num_targets, ())


ExamplesPlanner = Callable[[Sequence[StoredExample], int], tuple[Sequence[StoredExample], Sequence[shares.Portion]]]
"""(examples, ranks) -> examples without references, and the portion of each rank."""


@dataclass(frozen=True)
class Planners:
    """The planners of a learner group. None: every rank receives all references."""

    groups: shares.Planner | None = None  # of an RL step, or the rows of an offline job
    supervised: shares.Planner | None = None  # rows of `algorithm.supervised`
    examples: ExamplesPlanner | None = None  # of the warm start


NO_PLANNERS = Planners()


def planners_of(config: RunConfig) -> Planners:
    if config.offline.is_on:
        return Planners(rows_planner(config, end_row if config.offline.job == "reward_model" else answer_row))
    return Planners(
        shares.planner_of(config),
        rows_planner(config, answer_row, config.algorithm.supervised.batch_size),
        partial(portions_of_examples, config=config),
    )
