"""`mobula play`: an episode by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from mobula.actors.environments.base import Action, EpisodeError, Message, checked_rewards, parse_tool_calls
from mobula.actors.environments.hosts.pool import EnvironmentPool, EnvironmentSession
from mobula.cluster.errors import PreflightError, SkippedSample
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.overrides import groups
from mobula.configs.schema import RunConfig
from mobula.configs.schema.data import EnvironmentConfig
from mobula.deploy.serve.policy import LocalPolicy
from mobula.deploy.wiring.roles import sampling_settings

Player = Callable[[Sequence[Message]], Awaitable[str]]  # a conversation to the next message of the policy
ASSISTANT = "assistant"


@dataclass
class PlayedEpisode:
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


MAX_COLUMNS = 56  # of an image
HALF_BLOCK = "\u2580"  # its upper half has the colour of the text, its lower half that of the background
HELP = "A line is your turn. :policy lets the policy act, :reset [SEED] begins again, :quit ends."


async def play(game: Game, seed: int, console: Console) -> None:
    console.print(HELP, style="dim")
    episode = await game.begin(seed)
    _show(console, episode, 0)
    while True:
        try:
            line = await asyncio.to_thread(console.input, "> ")
        except EOFError:
            return
        command, _, rest = line.strip().partition(" ")
        num_shown = len(episode.messages)
        if command == ":quit":
            return
        if command == ":reset":
            if rest and not rest.isdecimal():
                console.print(f"{rest!r} is no seed: give a whole number", style="red")
                continue
            episode, num_shown = await game.begin(int(rest) if rest else episode.seed + 1), 0
        else:
            try:
                episode = await (game.let_policy_act() if command == ":policy" else game.act(line))
            except ValueError as error:
                console.print(str(error), style="red")
                continue
        _show(console, episode, num_shown)


async def watch(game: Game, seed: int, console: Console) -> None:
    episode = await game.begin(seed)
    _show(console, episode, 0)
    while not episode.outcome:
        num_shown = len(episode.messages)
        episode = await game.let_policy_act()
        _show(console, episode, num_shown)


def _show(console: Console, episode: PlayedEpisode, start: int) -> None:
    for message in episode.messages[start:]:
        style = {"system": "dim", ASSISTANT: "bold cyan"}.get(message.role, "")
        console.print(Text(f"{message.role}: ", style="dim") + Text(message.text, style=style))
        for image in message.images:
            console.print(blocks(image), end="")
    if episode.rewards and not episode.failure:
        parts = ", ".join(f"{name} {value:g}" for name, value in episode.rewards[-1].items())
        console.print(f"turn {episode.num_turns}: {parts} (sum {episode.total:g})", style="green")
    if episode.outcome:
        style = "red" if episode.failure else "yellow"
        shown = episode.failure or f"the episode is {episode.outcome}; its reward is {episode.total:g}"
        console.print(shown, style=style)


def blocks(encoded: bytes) -> Segments:
    with Image.open(BytesIO(encoded)) as opened:
        image = opened.convert("RGB")
    if image.width > MAX_COLUMNS:
        height = max(1, round(image.height * MAX_COLUMNS / image.width))
        image = image.resize((MAX_COLUMNS, height), Image.Resampling.BOX)
    pixels = np.asarray(image)
    if len(pixels) % 2:
        pixels = np.concatenate([pixels, pixels[-1:]])
    segments = []
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        for above, below in zip(upper, lower, strict=True):
            segments.append(Segment(HALF_BLOCK, Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below))))
        segments.append(Segment.line())
    return Segments(segments)


def play_config(name: str, overrides: Sequence[str], policy: str | None) -> RunConfig:
    """The configuration of an environment that is an option of the group `environment`, or `module:Class`."""
    if name == "none":
        raise ConfigError("environment=none is nothing to play: name an environment, e.g. mobula play pixel_maze")
    is_option = name in groups()["environment"]
    base = [f"environment={name}"] if is_option else [f"environment.name={name}"]
    base += ["data=environment", "rewards=environment", "sampler=huggingface"]
    base += [f"policy.model={policy}"] if policy else []
    return load_config([*base, *overrides], is_complete=False)


def start(config: RunConfig, *, seed: int, plays_itself: bool, has_policy: bool, console: Console) -> None:
    if plays_itself and not has_policy:
        raise PreflightError("--watch lets a policy play, and there is none: give --policy FOLDER")
    policy = LocalPolicy(config) if has_policy else None

    async def run() -> None:
        if policy is not None:
            await policy.start()
        game = Game(config.environment, partial(_said, policy) if policy is not None else None)
        try:
            await (watch if plays_itself else play)(game, seed, console)
        finally:
            await game.close()
            if policy is not None:
                await policy.close()

    asyncio.run(run())


async def _said(policy: LocalPolicy, messages: Sequence[Message]) -> str:
    config = policy.config
    settings = replace(sampling_settings(config), num_samples=1, seed=config.seed + len(messages), keeps_sets=False)
    try:
        return (await policy.answer(messages, settings)).text
    except SkippedSample as error:
        raise ValueError(str(error)) from error
