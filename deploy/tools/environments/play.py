"""`mobula play`: play an environment in the terminal, alone or with a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from mobula.actors.environments.base import Message
from mobula.cluster.errors import PreflightError, SkippedSample
from mobula.configs.errors import ConfigError
from mobula.configs.groups import groups
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.tools.environments.game import Game
from mobula.deploy.tools.environments.terminal_play import play, watch
from mobula.deploy.tools.policy.local_policy import LocalPolicy
from mobula.deploy.wiring.rollouts import sampling_settings


def play_config(name: str, overrides: Sequence[str], policy: str | None) -> RunConfig:
    """The configuration of an environment that is an option of the group `environment`, or `module:Class`.

    Raises:
        ConfigError: there is none, or a word is unfit.
    """
    if name == "none":
        raise ConfigError("environment=none is nothing to play: name an environment, e.g. mobula play pixel_maze")
    is_option = name in groups()["environment"]
    base = [f"environment={name}"] if is_option else [f"environment.name={name}"]
    base += ["data=environment", "rewards=environment", "sampler=huggingface"]
    base += [f"policy.model={policy}"] if policy else []
    return load_config([*base, *overrides], is_complete=False)


def start(config: RunConfig, *, seed: int, plays_itself: bool, has_policy: bool, console: Console) -> None:
    """Plays until the person ends it.

    Raises:
        PreflightError: the policy cannot be loaded, or none is to play.
    """
    if plays_itself and not has_policy:
        raise PreflightError("--watch lets a policy play, and there is none: give --policy FOLDER")
    policy = LocalPolicy(config) if has_policy else None
    asyncio.run(_run(config, policy, seed=seed, plays_itself=plays_itself, console=console))


async def _run(
    config: RunConfig, policy: LocalPolicy | None, *, seed: int, plays_itself: bool, console: Console
) -> None:
    if policy is not None:
        await policy.start()
    game = Game(config.environment, partial(_said, policy) if policy is not None else None)
    try:
        await (watch if plays_itself else play)(game, seed, console)
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
