"""Scores responses before the group is complete, and stores the outcomes until then."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from mobula.cluster.errors import LostObjectError, RewardError, WorkerDiedError
from mobula.cluster.records.trajectory import EndedResponse, Response
from mobula.rewards.contract import Outcome

logger = logging.getLogger(__name__)

Outcomes = Mapping[str, Outcome]
"""Component -> outcome, for one response."""


def response_digest(response: Response) -> bytes:
    """Returns a digest that is equal for responses that are equal to every reward function."""
    turns = [[turn.action, turn.observation, dict(turn.rewards)] for turn in response.turns]
    parts = [response.text, response.num_tokens, response.is_truncated, response.failure, turns]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for image in response.images:
        digest.update(hashlib.sha256(image).digest())  # one digest per file, so that boundaries of files count
    return digest.digest()


@dataclass(frozen=True)
class Ahead:
    """One response that is scored ahead."""

    digest: bytes  # `response_digest`
    task: asyncio.Task[Outcomes | None]  # None if the workers failed


class ScoringAhead:
    """Starts to score responses when they end, and returns the outcomes when the group is complete."""

    def __init__(self, score: Callable[[EndedResponse], Awaitable[Outcomes]]) -> None:
        self._score = score
        self._begun: dict[str, dict[int, Ahead]] = {}  # prompt id -> sibling

    def begin(self, ended: EndedResponse) -> None:
        prompt_id = ended.prompt.prompt_id
        siblings = self._begun.setdefault(prompt_id, {})
        if ended.sibling in siblings:  # a restarted episode has another end
            siblings[ended.sibling].task.cancel()
        task = asyncio.create_task(self._outcomes(ended), name=f"score {prompt_id}#{ended.sibling} ahead")
        siblings[ended.sibling] = Ahead(response_digest(ended.response), task)

    @contextmanager
    def taken(self, prompt_id: str) -> Iterator[Mapping[int, Ahead]]:
        """Yields the started scores of a group by sibling. On exit they are dropped and calls in progress cancelled."""
        siblings = self._begun.pop(prompt_id, {})
        try:
            yield siblings
        finally:
            for ahead in siblings.values():
                ahead.task.cancel()

    async def close(self) -> None:
        tasks = [ahead.task for siblings in self._begun.values() for ahead in siblings.values()]
        self._begun.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcomes(self, ended: EndedResponse) -> Outcomes | None:
        """Scores a response. Failures of workers are logged here; the group is scored again and then raises them."""
        try:
            return await self._score(ended)
        except (RewardError, LostObjectError, WorkerDiedError) as error:
            name = f"{ended.prompt.prompt_id}#{ended.sibling}"
            logger.warning("%s was not scored ahead, so it is scored with its group: %s", name, error)
            return None
