"""Responses that are scored while their siblings are still sampled, kept until their group is complete."""

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

Said = Mapping[str, Outcome]
"""The outcomes of a recipe's components for one response."""


def response_digest(response: Response) -> bytes:
    """Equal for responses that no reward function can tell apart."""
    turns = [[turn.action, turn.observation, dict(turn.rewards)] for turn in response.turns]
    parts = [response.text, response.num_tokens, response.is_truncated, response.failure, turns]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for picture in response.pictures:
        digest.update(hashlib.sha256(picture).digest())
    return digest.digest()


@dataclass(frozen=True)
class Ahead:
    """One response that is scored, or was; `said` is None where the way to the components failed."""

    digest: bytes  # of the response
    said: asyncio.Task[Said | None]


class ScoringAhead:
    """Begins to score responses as they end, and gives a group what was begun for it."""

    def __init__(self, score: Callable[[EndedResponse], Awaitable[Said]]) -> None:
        self._score = score
        self._begun: dict[str, dict[int, Ahead]] = {}  # prompt id -> sibling

    def begin(self, ended: EndedResponse) -> None:
        prompt_id = ended.prompt.prompt_id
        siblings = self._begun.setdefault(prompt_id, {})
        if ended.sibling in siblings:  # an episode that was begun again has another end
            siblings[ended.sibling].said.cancel()
        task = asyncio.create_task(self._said(ended), name=f"score {prompt_id}#{ended.sibling} ahead")
        siblings[ended.sibling] = Ahead(response_digest(ended.response), task)

    @contextmanager
    def taken(self, prompt_id: str) -> Iterator[Mapping[int, Ahead]]:
        """The scores that were started for the group, by sibling. It is then dropped, and calls in progress are
        cancelled."""
        siblings = self._begun.pop(prompt_id, {})
        try:
            yield siblings
        finally:
            for ahead in siblings.values():
                ahead.said.cancel()

    async def close(self) -> None:
        tasks = [ahead.said for siblings in self._begun.values() for ahead in siblings.values()]
        self._begun.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _said(self, ended: EndedResponse) -> Said | None:
        """Failures of workers are counted where they happen; the group tries again, and only then has a policy."""
        try:
            return await self._score(ended)
        except (RewardError, LostObjectError, WorkerDiedError) as error:
            name = f"{ended.prompt.prompt_id}#{ended.sibling}"
            logger.warning("%s was not scored ahead, so it is scored with its group: %s", name, error)
            return None
