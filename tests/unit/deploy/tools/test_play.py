"""`mobula play`: one game by its rules, shown in the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episode_data import episode_config
from rich.console import Console

from mobula.actors.environments.base import Message, encoded
from mobula.cluster.errors import PreflightError
from mobula.configs.errors import ConfigError
from mobula.deploy.serve import play as terminal_play
from mobula.deploy.serve.play import Game, play_config, start

CALCULATOR = ["environment.options={images: false, max_operand: 9, max_turns: 3, tool_bonus: 0.0}"]


def calculator(player: Any = None) -> Game:
    return Game(play_config("calculator", CALCULATOR, None).environment, player)


async def test_a_game_follows_the_rules_of_a_run() -> None:
    game = calculator()
    with pytest.raises(ValueError, match="begin one"):
        await game.act("7")
    episode = await game.begin(3)
    first, sign, second = re.search(r"Compute (\d) ([-+*]) (\d)", episode.messages[0].text).groups()
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{first}{sign}{second}"}}}}</tool_call>'
    episode = await game.act(call)
    assert episode.statuses == ["ok"] and episode.messages[-1].role == "tool" and not episode.outcome
    episode = await game.act(episode.messages[-1].text)
    assert episode.outcome == "terminated" and episode.total == 1.0
    with pytest.raises(ValueError, match="begin one"):
        await game.act("again")
    await game.begin(3)
    for _ in range(3):
        episode = await game.act("<tool_call>{</tool_call>")
    assert episode.outcome == "truncated" and episode.statuses == ["invalid_json"] * 3
    await game.close()


async def test_what_an_environment_does_wrong_is_the_outcome_and_the_next_episode_begins() -> None:
    words = ("environment.options={fault: raise, turn: 2}", "environment.host=inline")
    game = Game(episode_config(Path("model"), *words).environment)
    await game.begin(1)
    await game.act("go")
    episode = await game.act("go")
    assert episode.outcome == "failed" and episode.failure.startswith("raised: ") and episode.num_turns == 1
    assert not (await game.begin(2)).outcome
    await game.close()


async def test_a_policy_plays_the_conversation_so_far() -> None:
    seen = []

    async def player(messages: Sequence[Message]) -> str:
        seen.append([message.role for message in messages])
        return "no answer"

    game = calculator(player)
    await game.begin(0)
    episode = await game.let_policy_act()
    assert seen == [["user"]] and episode.messages[1].text == "no answer" and episode.outcome == "terminated"
    await game.close()
    with pytest.raises(ValueError, match="--policy"):
        await calculator().let_policy_act()


async def test_the_terminal_takes_a_line_as_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([":reset x", ":reset 4", "first", ":policy", ":quit"])
    monkeypatch.setattr(Console, "input", lambda self, prompt: next(lines))
    shown = StringIO()
    game = calculator()
    await terminal_play.play(game, 0, Console(file=shown, width=200))
    text = shown.getvalue()
    assert "'x' is no seed" in text and "assistant: first" in text and "its reward is 0" in text
    assert "--policy" in text and game.episode.seed == 4
    await game.close()


def test_an_image_becomes_half_blocks_of_its_colours() -> None:
    pixels = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [9, 9, 9]], [[1, 2, 3], [4, 5, 6]]], dtype=np.uint8)
    segments = [s for s in terminal_play.blocks(encoded(pixels)).segments if s.text != "\n"]
    colours = [(tuple(s.style.color.triplet), tuple(s.style.bgcolor.triplet)) for s in segments]
    assert colours[:2] == [((255, 0, 0), (0, 0, 255)), ((0, 255, 0), (9, 9, 9))]
    assert colours[2] == ((1, 2, 3), (1, 2, 3))
    wide = terminal_play.blocks(encoded(np.zeros((4, 300, 3), dtype=np.uint8)))
    assert sum(s.text == "\n" for s in wide.segments) == 1
    assert sum(s.text != "\n" for s in wide.segments) == terminal_play.MAX_COLUMNS


def test_unfit_words_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError):
        play_config("calculator", ["environment.no_such_key=1"], None)
    options = {"seed": 0, "console": Console(file=StringIO())}
    with pytest.raises(ConfigError, match="name an environment"):
        play_config("none", [], None)
    with pytest.raises(PreflightError, match="--policy"):
        start(play_config("calculator", [], None), plays_itself=True, has_policy=False, **options)
