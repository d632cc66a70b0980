"""Mazes as pixels: a frozen lake drawn as coloured squares, or an empty room or maze of MiniGrid."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Any, Literal

import gymnasium
import numpy as np
from minigrid.wrappers import RGBImgObsWrapper

from mobula.actors.environments.base import Action, EnvironmentSpec, Message, Reset, Step, encoded

FROZEN_LAKE, MINIGRID = "frozen_lake", "minigrid"
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}  # (row, column), in Gymnasium's order
SQUARE_COLORS = {"ice": (220, 235, 255), "hole": (20, 20, 60), "goal": (40, 180, 60), "player": (220, 40, 40)}
TURNS = {"left": 0, "right": 1, "forward": 2}  # the actions of MiniGrid that move
MAX_TRIES = 1000


class PixelMaze:
    """A move a turn, by its name; the reward is 1 at the goal.

    `frozen_lake` draws a map of `size` x `size` squares from the seed, a share `hole_share` of them holes that end the
    episode; there is always a way. It is walked with the transitions of Gymnasium's FrozenLake-v1 without slipping.
    Options of a reset: `size` and `hole_share`, in place of those that the environment was made with.
    `minigrid` is `MiniGrid-SimpleCrossingS9N1-v0`, seen from above. A frame is `size * square_pixels` pixels wide.
    """

    def __init__(
        self,
        *,
        layout: Literal["frozen_lake", "minigrid"],
        size: int,
        hole_share: float,
        square_pixels: int,
        max_turns: int,
        invalid_reward: float,
    ) -> None:
        if layout not in (FROZEN_LAKE, MINIGRID):
            raise ValueError(f"layout={layout!r} is unknown: choose {FROZEN_LAKE} or {MINIGRID}")
        if square_pixels < 1 or max_turns < 1:
            raise ValueError(f"square_pixels={square_pixels}, max_turns={max_turns}: give 1 or more")
        self.spec = EnvironmentSpec(max_turns=max_turns, demonstrates=layout == FROZEN_LAKE)
        self._layout, self._scale = layout, square_pixels
        _check_lake(size, hole_share)
        self._lake = {"size": size, "hole_share": hole_share}
        self._size = size
        self._names = tuple(MOVES if layout == FROZEN_LAKE else TURNS)
        self._invalid_reward = invalid_reward
        self._environment: gymnasium.Env[Any, Any] | None = None
        self._map: tuple[str, ...] = ()
        self._place = (0, 0)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self.close()
        info: dict[str, str] = {}
        if self._layout == FROZEN_LAKE:
            chosen = {**self._lake, **options}
            self._map, way = _lake(Random(seed), **chosen)
            self._size = chosen["size"]
            self._environment = gymnasium.make("FrozenLake-v1", desc=list(self._map), is_slippery=False)
            info = {"answer": way[0], "solution": way[0]}
        else:
            environment = gymnasium.make("MiniGrid-SimpleCrossingS9N1-v0")
            self._environment = RGBImgObsWrapper(environment, tile_size=self._scale)
        observation, _ = self._environment.reset(seed=seed)
        text = f"<image>Go to the green square. Answer with one of: {', '.join(self._names)}."
        return Reset((Message("user", text, (self._frame(observation),)),), info)

    def step(self, action: Action) -> Step:
        assert self._environment is not None, "reset comes first"
        words = action.text.lower().replace(".", " ").replace(",", " ").split()
        chosen = next((word for word in reversed(words) if word in self._names), None)
        if chosen is None:
            message = Message("user", f"Answer with one of: {', '.join(self._names)}.")
            return Step((message,), self._invalid_reward, False, False, {"is_valid": False})
        number = TURNS[chosen] if self._layout == MINIGRID else list(MOVES).index(chosen)
        observation, reward, terminated, truncated, _ = self._environment.step(number)
        message = Message("user", "<image>", (self._frame(observation),))
        return Step((message,), float(float(reward) > 0), bool(terminated), bool(truncated), {"is_valid": True})

    def demonstrate(self) -> str:
        """The first move of a shortest way to the goal."""
        squares = {(r, c): mark for r, row in enumerate(self._map) for c, mark in enumerate(row)}
        goal = next(place for place, mark in squares.items() if mark == "G")
        holes = {place for place, mark in squares.items() if mark == "H"}
        way = _way(self._place, goal, holes, self._size)
        assert way, "an episode that is not over has a way from every square"
        return way[0]

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _frame(self, observation: Any) -> bytes:
        if self._layout == MINIGRID:
            return encoded(observation["image"])
        squares = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}
        self._place = divmod(int(observation), self._size)
        pixels = np.array([[SQUARE_COLORS[squares[square]] for square in row] for row in self._map], dtype=np.uint8)
        pixels[self._place] = SQUARE_COLORS["player"]
        return encoded(pixels, scale=self._scale)


def _check_lake(size: int, hole_share: float) -> None:
    if size < 2 or not 0 <= hole_share < 1:
        raise ValueError(f"size={size}, hole_share={hole_share}: give size >= 2 and 0 <= hole_share < 1")


def _lake(choice: Random, size: int, hole_share: float) -> tuple[tuple[str, ...], list[str]]:
    """A map with a start and a goal in other places, and a shortest way between them."""
    _check_lake(size, hole_share)
    places = [(row, column) for row in range(size) for column in range(size)]
    for _ in range(MAX_TRIES):
        start, goal = choice.sample(places, 2)
        holes = {place for place in places if place not in (start, goal) and choice.random() < hole_share}
        way = _way(start, goal, holes, size)
        if way is not None:
            marks = {**dict.fromkeys(holes, "H"), start: "S", goal: "G"}
            rows = tuple("".join(marks.get((row, column), "F") for column in range(size)) for row in range(size))
            return rows, way
    raise ValueError(f"no map with a way in {MAX_TRIES} tries: lower hole_share={hole_share}")


def _way(start: tuple[int, int], goal: tuple[int, int], holes: set[tuple[int, int]], size: int) -> list[str] | None:
    """The names of the moves from start to goal, by breadth-first search; None if there is no way."""
    ways: dict[tuple[int, int], list[str]] = {start: []}
    waiting = deque([start])
    while waiting:
        place = waiting.popleft()
        if place == goal:
            return ways[place]
        for name, (down, right) in MOVES.items():
            after = (place[0] + down, place[1] + right)
            if after not in ways and after not in holes and all(0 <= part < size for part in after):
                ways[after] = [*ways[place], name]
                waiting.append(after)
    return None
