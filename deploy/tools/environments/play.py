"""`mobula play`: play an environment, in the terminal or on a page on loopback, alone or beside a policy."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import uvicorn
from rich.console import Console

from actors.environments.base import Message
from cluster.errors import PreflightError, SkippedSample
from configs.errors import ConfigError
from configs.groups import groups
from configs.load import load_config
from configs.schema import RunConfig
from deploy.tools.environments.game import Game
from deploy.tools.environments.page_play import make_page
from deploy.tools.environments.terminal_play import play, watch
from deploy.tools.policy.local_policy import LocalPolicy
from deploy.tools.serve_rewards import listen
from deploy.wiring.rollouts import sampling_settings

LOOPBACK = "127.0.0.1"


def play_config(name: str, overrides: Sequence[str], policy: str | None) -> RunConfig:
    """The configuration of an environment that is an option of the group `environment`, or `module:Class`.

    Raises:
        ConfigError: there is none, or a word is unfit.
    """
    if name == "none":
        raise ConfigError("environment=none is nothing to play: name an environment, e.g. mobula play pixel_maze")
    is_option = name in groups()["environment"]
    words = [f"environment={name}"] if is_option else [f"environment.name={name}"]
    words += ["data=environment", "rewards=environment", "sampler=huggingface"]
    words += [f"policy.model={policy}"] if policy else []
    return load_config([*words, *overrides], is_complete=False)


def start(
    config: RunConfig, *, seed: int, port: int | None, plays_itself: bool, has_policy: bool, console: Console
) -> int:
    """Play until the person ends it; returns the exit code.

    Raises:
        PreflightError: the policy cannot be loaded, or none is to play.
    """
    if plays_itself and not has_policy:
        raise PreflightError("--watch lets a policy play, and there is none: give --policy FOLDER")
    policy = LocalPolicy(config) if has_policy else None
    asyncio.run(_run(config, policy, seed=seed, port=port, plays_itself=plays_itself, console=console))
    return 0


async def _run(
    config: RunConfig, policy: LocalPolicy | None, *, seed: int, port: int | None, plays_itself: bool, console: Console
) -> None:
    if policy is not None:
        await policy.start()
    game = Game(config.environment, partial(_said, policy) if policy is not None else None)
    try:
        if plays_itself and port is None:
            await watch(game, seed, console)
        elif port is None:
            await play(game, seed, console)
        else:
            await _serve(game, config.environment.name, seed, port, console)
    finally:
        await game.close()
        if policy is not None:
            await policy.close()


async def _said(policy: LocalPolicy, messages: Sequence[Message]) -> str:
    """Raises: ValueError: the conversation cannot be put to the model."""
    config = policy.config
    settings = replace(sampling_settings(config), num_samples=1, seed=config.seed + len(messages), keeps_sets=False)
    try:
        return (await policy.answer(messages, settings)).text
    except SkippedSample as error:
        raise ValueError(str(error)) from error


async def _serve(game: Game, name: str, seed: int, port: int, console: Console) -> None:
    listener = listen(LOOPBACK, port)
    server = uvicorn.Server(uvicorn.Config(make_page(game, name, seed), log_level="warning"))
    console.print(f"play {name}: http://{LOOPBACK}:{listener.getsockname()[1]} (Ctrl-C ends)", markup=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the server raises what stopped it again once it is done
    await server.serve(sockets=[listener])
