"""Play in the terminal: observations as text and images as coloured half blocks; a line is a turn."""

from __future__ import annotations

import asyncio
from io import BytesIO

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from mobula.deploy.tools.environments.game import ASSISTANT, Game, PlayedEpisode

MAX_COLUMNS = 56  # of an image
HALF_BLOCK = "\u2580"  # its upper half has the colour of the text, its lower half that of the background
HELP = "A line is your turn. :policy lets the policy act, :reset [SEED] begins again, :quit ends."


async def play(game: Game, seed: int, console: Console) -> None:
    """Play until `:quit` or the end of the input."""
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
                console.print(f"{rest!r} is no seed: give a whole number", style="red", markup=False)
                continue
            episode, num_shown = await game.begin(int(rest) if rest else episode.seed + 1), 0
        else:
            try:
                episode = await (game.let_policy_act() if command == ":policy" else game.act(line))
            except ValueError as error:
                console.print(str(error), style="red", markup=False)
                continue
        _show(console, episode, num_shown)


async def watch(game: Game, seed: int, console: Console) -> None:
    """Let the policy play one episode to its end."""
    episode = await game.begin(seed)
    _show(console, episode, 0)
    while not episode.outcome:
        num_shown = len(episode.messages)
        episode = await game.let_policy_act()
        _show(console, episode, num_shown)


def _show(console: Console, episode: PlayedEpisode, start: int) -> None:
    """The messages from `start` on, and what was paid."""
    for message in episode.messages[start:]:
        style = {"system": "dim", ASSISTANT: "bold cyan"}.get(message.role, "")
        console.print(Text(f"{message.role}: ", style="dim") + Text(message.text, style=style))
        for image in message.images:
            console.print(blocks(image), end="")
    if episode.rewards and not episode.failure:
        parts = ", ".join(f"{name} {value:g}" for name, value in episode.rewards[-1].items())
        console.print(f"turn {episode.num_turns}: {parts} (sum {episode.total:g})", style="green", markup=False)
    if episode.outcome:
        style = "red" if episode.failure else "yellow"
        shown = episode.failure or f"the episode is {episode.outcome}; its reward is {episode.total:g}"
        console.print(shown, style=style, markup=False)


def blocks(encoded: bytes) -> Segments:
    """An image as rows of half blocks, two pixels each, at most `MAX_COLUMNS` wide."""
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
