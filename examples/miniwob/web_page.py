"""MiniWoB: a small web page as pixels, and clicks, drags and keys to do what it asks for."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from playwright.async_api import Error as BrowserError
from playwright.async_api import FloatRect, Page

from mobula.actors.environments.base import Action, EnvironmentSpec, Message, Reset, Step
from mobula.examples.miniwob.browser import Browser, T, find_chromium

PACKAGE = "miniwob"
WIDTH, HEIGHT = 160, 210  # of the part of the page that is the task
WINDOW = (500, 320)
EPISODE_MS = 3_600_000  # of the page's own clock: the turns of a policy are counted, not its seconds
KEYS = {"enter": "Enter", "tab": "Tab", "backspace": "Backspace"}
CLIP: FloatRect = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT}
NUMBER = r"(\d{1,3}(?:\.\d+)?)"
ACTIONS = re.compile(
    rf"\b(?:click\s+{NUMBER}[\s,]+{NUMBER}|drag\s+{NUMBER}[\s,]+{NUMBER}[\s,]+{NUMBER}[\s,]+{NUMBER}"
    r"|type\s+\"([^\"\n]{1,500})\"|press\s+(enter|tab|backspace)\b)",
    re.IGNORECASE,
)
HELP = (
    'Answer with one of: click X Y, drag X Y X Y, type "TEXT", press ENTER, press TAB, press BACKSPACE. '
    f"The page is {WIDTH} wide and {HEIGHT} high."
)
BEGIN = """
core.EPISODE_MAX_TIME = {ms}; Math.seedrandom({seed}); core.setDataMode("train"); core.startEpisodeReal();
new Promise(done => {{ const look = () => WOB_TASK_READY ? done(core.getUtterance()) : setTimeout(look, 20); look(); }})
"""
STATE = "[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"
# The middle of the only button, or of the element whose text the task quotes.
TARGET = """
(() => {
  const quoted = [...UTTERANCE.matchAll(/"([^"]+)"/g)].map(found => found[1]);
  const kinds = ["button", "input[type=button]", "a", ".alink", "label"].map(kind => "#area " + kind);
  const all = [...document.querySelectorAll(kinds.join(","))];
  const fit = all.length === 1 ? all : all.filter(e => quoted.includes((e.value || e.textContent).trim()));
  if (fit.length !== 1) return null;
  const box = fit[0].getBoundingClientRect();
  return [Math.round(box.x + box.width / 2), Math.round(box.y + box.height / 2)];
})()
"""


class MiniWoB:
    """`task` is a page of MiniWoB++ such as `click-test`, `click-button` or `enter-text`.

    The observation is the task's 160 x 210 pixels, and what it asks for as text. The reward is the page's own without
    its time bonus, -1 to 1, when it says that the task is over. A turn without an action costs a turn. Where the task
    is one click on something that its text names, `info["solution"]` is that click.

    Source: MiniWoB++ 1.1 (miniwob.farama.org), whose pages this runs; its Python code is not used.
    """

    def __init__(self, *, task: str, max_turns: int, timeout_s: float = 20.0) -> None:
        find_chromium()
        found = importlib.util.find_spec(PACKAGE)  # its code would load selenium
        if found is None or not found.submodule_search_locations:
            raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
        folder = Path(found.submodule_search_locations[0]) / "html" / "miniwob"
        if not (folder / f"{task}.html").is_file():
            raise ValueError(f"options.task={task!r} is no page of {folder}: choose one, e.g. click-test")
        self._url = (folder / f"{task}.html").as_uri()
        self._timeout_s = timeout_s
        self._browser: Browser | None = None
        self._page: Page | None = None
        self.spec = EnvironmentSpec(max_turns=max_turns)

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        task, target, image = self._run(self._begin(seed))
        info = {} if target is None else dict.fromkeys(("answer", "solution"), f"click {target[0]} {target[1]}")
        return Reset((Message("user", f"<image>{task}\n{HELP}", (image,)),), info)

    def step(self, action: Action) -> Step:
        matches = list(ACTIONS.finditer(action.text))
        if not matches:
            return Step((Message("user", HELP),), 0.0, False, False, {"is_valid": False})
        is_done, reward, image = self._run(self._act(matches[-1]))
        observation = () if is_done else (Message("user", "<image>", (image,)),)
        return Step(observation, float(reward) if is_done else 0.0, is_done, False, {"is_valid": True})

    def close(self) -> None:
        if self._page is not None:
            page, self._page = self._page, None
            try:
                self._run(page.context.close())
            except BrowserError:
                """It has ended with its browser."""

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._browser is None:
            self._browser = Browser.shared()
        return self._browser.run(work, self._timeout_s)

    async def _begin(self, seed: int) -> tuple[str, list[int] | None, bytes]:
        """What the task asks for, the click that solves it if its text names one, and the image."""
        if self._page is None:
            assert self._browser is not None, "`_run` has set it"
            self._page = await self._browser.new_page(*WINDOW)
        await self._page.goto(self._url)
        task = str(await self._page.evaluate(BEGIN.format(ms=EPISODE_MS, seed=json.dumps(str(seed)))))
        target = await self._page.evaluate(TARGET.replace("UTTERANCE", json.dumps(task)))
        return task, target, await self._page.screenshot(clip=CLIP)

    async def _act(self, match: re.Match[str]) -> tuple[bool, float, bytes]:
        """Whether the task is over, its reward, and the image."""
        assert self._page is not None, "reset comes first"
        page = self._page
        *numbers, text, key = match.groups()
        if key is not None:
            await page.keyboard.press(KEYS[key.lower()])
        elif text is not None:
            await page.keyboard.insert_text(text)
        else:
            places = [_inside(float(n), (WIDTH, HEIGHT)[i % 2]) for i, n in enumerate(filter(None, numbers))]
            await page.mouse.move(places[0], places[1])
            await page.mouse.down()
            if places[-2:] != places[:2]:
                await page.mouse.move(places[-2], places[-1], steps=2)
            await page.mouse.up()
        is_done, reward = await page.evaluate(STATE)
        return is_done, reward, b"" if is_done else await page.screenshot(clip=CLIP)


def _inside(value: float, limit: int) -> float:
    """A coordinate within the task: what lies beside it is no part of it."""
    return min(value, limit - 1)
