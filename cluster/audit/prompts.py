"""PromptLedger: what became of each prompt that a run handed out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

JOURNAL = "settled by the journal"  # rejected after the newest record of a killed part


@dataclass(frozen=True)
class PromptAccount:
    """Each prompt that was handed out is in one of the four lists."""

    trained: tuple[str, ...]
    rejected: tuple[tuple[str, str], ...]  # id, reason
    open: tuple[str, ...]  # known to the newest part: in flight, or in the buffer
    lost: tuple[str, ...]  # handed out by an earlier part, and not known to the newest one

    @property
    def num(self) -> int:
        return len(self.trained) + len(self.rejected) + len(self.open) + len(self.lost)


class PromptLedger:
    """Replays hand-outs and rejections. The trained groups are those of the steps of a `History`."""

    def __init__(self) -> None:
        self._part_of: dict[str, int] = {}  # prompt -> newest part that handed it out or continued it
        self._rejected: dict[str, str] = {}
        self._part = 0

    def begin_part(self) -> None:
        self._part += 1

    def add(self, handed_out: Iterable[str], rejected: Iterable[Sequence[str]]) -> None:
        """Applies the prompts of one record: hand-outs come before rejections."""
        for prompt_id in handed_out:
            self._hand_out(prompt_id)
        for prompt_id, reason in rejected:
            self._rejected[prompt_id] = reason

    def continued(self, pending: Iterable[str], settled: Iterable[str]) -> None:
        """Applies the prompts that a resumed run knows."""
        for prompt_id in pending:
            self._hand_out(prompt_id)
        for prompt_id in settled:
            # Prompts of repeated steps are settled, too: the account counts them as trained.
            self._part_of.setdefault(prompt_id, self._part)
            self._rejected.setdefault(prompt_id, JOURNAL)

    def account(self, trained: Iterable[str]) -> PromptAccount:
        """Returns the account of the run; `trained` are the groups of its line of versions."""
        known = set(trained)
        others = {prompt_id: part for prompt_id, part in self._part_of.items() if prompt_id not in known}
        left = {prompt_id: part for prompt_id, part in others.items() if prompt_id not in self._rejected}
        return PromptAccount(
            trained=tuple(prompt_id for prompt_id in self._part_of if prompt_id in known),
            rejected=tuple((i, self._rejected[i]) for i in others if i in self._rejected),
            open=tuple(prompt_id for prompt_id, part in left.items() if part == self._part),
            lost=tuple(prompt_id for prompt_id, part in left.items() if part < self._part),
        )

    def unknown(self, trained: Iterable[str]) -> list[str]:
        """Returns the trained and rejected prompts that no record handed out; none if the run records no hand-out."""
        if not self._part_of:
            return []
        return [prompt_id for prompt_id in (*trained, *self._rejected) if prompt_id not in self._part_of]

    def _hand_out(self, prompt_id: str) -> None:
        self._part_of[prompt_id] = self._part
        self._rejected.pop(prompt_id, None)  # a resume from an older checkpoint voids the rejection
