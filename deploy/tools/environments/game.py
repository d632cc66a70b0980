"""Game: one episode at a time of the configured environment, played turn by turn by a person or a policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from mobula.actors.environments.base import Action, EpisodeError, Message, checked_rewards
from mobula.actors.environments.hosts.pool import EnvironmentPool, EnvironmentSession
from mobula.actors.environments.tool_calls import parse_tool_calls
from mobula.configs.schema.environment import EnvironmentConfig

Player = Callable[[Sequence[Message]], Awaitable[str]]  # a conversation to the next message of the policy

ASSISTANT = "assistant"


@dataclass
class PlayedEpisode:
    """The messages of an episode, and the reward of each turn."""

    seed: int
    messages: list[Message]
    rewards: list[dict[str, float]] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)  # of the tool calls of each turn
    outcome: str = ""  # terminated | truncated | failed; empty while it goes on
    failure: str = ""

    @property
    def total(self) -> float:
        return sum(sum(parts.values()) for parts in self.rewards)

    @property
    def num_turns(self) -> int:
        return len(self.rewards)


class Game:
    """Plays one episode at a time, with the timeouts and checks of a run."""

    def __init__(self, config: EnvironmentConfig, player: Player | None = None) -> None:
        self._pool = EnvironmentPool(config, takes_images=True)
        self._player = player
        self._stack = AsyncExitStack()
        self._session: EnvironmentSession | None = None
        self.episode: PlayedEpisode | None = None

    async def begin(self, seed: int) -> PlayedEpisode:
        """Begins the episode of a seed. Errors of the environment become the outcome."""
        await self._stack.aclose()
        self._stack = AsyncExitStack()
        self.episode = episode = PlayedEpisode(seed, [])
        try:
            self._session = await self._stack.enter_async_context(self._pool.session())
            episode.messages += (await self._session.reset(seed)).observation
        except EpisodeError as error:
            await self._fail(episode, error)
        return episode

    async def act(self, text: str) -> PlayedEpisode:
        """Take a turn with this text.

        Raises:
            ValueError: there is no episode that goes on.
        """
        episode, session = self.episode, self._session
        if episode is None or session is None or episode.outcome:
            raise ValueError("no episode goes on: begin one")
        action = Action(text, parse_tool_calls(text, session.spec.tools))
        episode.messages.append(Message(ASSISTANT, text))
        try:
            step = await session.step(action)
            episode.rewards.append(checked_rewards(step.reward))
        except EpisodeError as error:
            await self._fail(episode, error)
            return episode
        episode.statuses.append(action.status)
        episode.messages += step.observation
        if step.terminated:
            episode.outcome = "terminated"
        elif step.truncated or episode.num_turns >= session.spec.max_turns:
            episode.outcome = "truncated"
        return episode

    async def let_policy_act(self) -> PlayedEpisode:
        """Take a turn with the policy's message.

        Raises:
            ValueError: there is no policy, or no episode that goes on.
        """
        if self._player is None or self.episode is None:
            raise ValueError("no policy plays: give --policy FOLDER")
        return await self.act(await self._player(self.episode.messages))

    async def close(self) -> None:
        await self._stack.aclose()
        self._pool.close()

    async def _fail(self, episode: PlayedEpisode, error: EpisodeError) -> None:
        episode.outcome, episode.failure = "failed", f"{error.kind}: {error}"
        stack, self._stack, self._session = self._stack, AsyncExitStack(), None
        try:
            async with stack:  # so that the environment is not used again
                raise error
        except EpisodeError:
            """It is the outcome."""
