"""TextArena: games of TextArena for one player, or for several against an opponent function of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import textarena

from mobula.actors.environments.base import Action, EnvironmentSpec, Message, Reset, Step
from mobula.cluster.user_code import load

RAW = "-raw"  # variant without wrappers, which returns each message once
GAME = -1  # sender of messages of the game


class TextArena:
    """The policy is player 0; a turn is an action, and the observation is the messages since the last turn.

    With `num_players` above 1, `opponent` (`module:function`) gets the messages of another player and returns that
    player's action. The reward is given at the end of the game; an invalid move that the game forgives costs nothing.

    TextArena uses Python's global random state: use `environment.host=process`, `ray` or `remote`.

    Source: TextArena 0.7.4, `make`, `reset`, `get_observation`, `step`, `close`.
    """

    def __init__(
        self,
        *,
        id: str,
        max_turns: int,
        num_players: int = 1,
        opponent: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if (num_players > 1) != bool(opponent):
            raise ValueError(
                f"options.num_players={num_players} with options.opponent={opponent!r}: name an opponent "
                "(module:function) for a game of several players, and none for a game of one"
            )
        self._opponent: Callable[[str], str] | None = load(opponent) if opponent else None
        try:
            self._game = textarena.make(f"{id.removesuffix(RAW)}{RAW}", **(arguments or {}))
        except (ValueError, TypeError, ImportError, LookupError) as error:
            raise ValueError(f"options.id={id!r}: {error}") from error
        if "seed" not in inspect.signature(self._game.reset).parameters:
            raise ValueError(f"options.id={id!r}: its reset takes no seed, so siblings would get different games")
        self._num_players = num_players
        self.spec = EnvironmentSpec(max_turns=max_turns)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._game.reset(num_players=self._num_players, seed=seed)
        text, done = self._until_our_turn()
        if done:
            raise ValueError(f"the game of seed {seed} ends before the policy's first turn")
        return Reset((Message("user", text),), {})

    def step(self, action: Action) -> Step:
        done, _ = self._game.step(action=action.text)
        text = ""
        if not done:
            text, done = self._until_our_turn()
        if not done:
            return Step((Message("user", text),), 0.0, False, False, {})
        rewards, info = self._game.close()
        is_valid = not info[0]["invalid_move"]
        return Step((), float((rewards or {}).get(0, 0.0)), True, False, {"is_valid": is_valid})

    def close(self) -> None:
        """Does nothing."""

    def _until_our_turn(self) -> tuple[str, bool]:
        """Plays the other players' turns; returns the new messages for player 0, and whether the game has ended."""
        while True:
            player, messages = self._game.get_observation()
            if player == 0:
                return self._text(messages, 0), False
            assert self._opponent is not None, "a game of one player has no opponent"
            done, _ = self._game.step(action=str(self._opponent(self._text(messages, player))))
            if done:
                return "", True

    def _text(self, messages: Sequence[tuple[int, str, Any]], player: int) -> str:
        """The new messages for a player, without the player's own messages."""
        names = self._game.state.role_mapping
        others = [(sender, text) for sender, text, _ in messages if sender != player]
        lines = [text if sender == GAME else f"[{names.get(sender, sender)}] {text}" for sender, text in others]
        return "\n".join(line.strip() for line in lines).strip() or "Your turn."
