"""MiniWoB++ in a real Chromium: seeds, clicks, text, separate contexts, and no browser that is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mobula.actors.environments.base import Action, observation_hash
from mobula.actors.environments.registry import build_environment
from mobula.examples.miniwob.browser import NAMES, Browser
from mobula.examples.miniwob.web_page import MiniWoB

pytest.importorskip("miniwob", reason="pip install 'mobula[miniwob]'")
pytestmark = [
    pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="there is no chromium on this machine"),
    pytest.mark.alone,
]


@pytest.fixture(scope="module", autouse=True)
def browser() -> Iterator[Browser]:
    found = Browser.shared()
    yield found
    found.close()


def middle(environment: MiniWoB, selector: str) -> list[float]:
    """Of an element, by the page itself."""
    box = f"document.querySelector('{selector}').getBoundingClientRect()"
    return environment._run(environment._page.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})"))


def test_the_same_seed_gives_the_same_page_and_the_named_click_pays() -> None:
    environment = MiniWoB(task="click-button", max_turns=3)
    starts = {seed: environment.reset(seed=seed, options={}) for seed in (1, 2)}
    again = environment.reset(seed=1, options={})
    assert observation_hash(again.observation) == observation_hash(starts[1].observation)
    assert observation_hash(starts[1].observation) != observation_hash(starts[2].observation)
    assert 'Click on the "' in again.observation[0].text
    step = environment.step(Action(again.info["solution"]))
    assert (step.reward, step.terminated) == (1.0, True)
    environment.close()


def test_a_wrong_click_costs_and_a_turn_without_an_action_is_answered() -> None:
    environment = MiniWoB(task="click-test-2", max_turns=3)
    start = environment.reset(seed=0, options={})
    assert "ONE" in start.observation[0].text
    step = environment.step(Action("I do not know."))
    assert not step.terminated and "click X Y" in step.observation[0].text and step.info == {"is_valid": False}
    two = middle(environment, "#subbtn2")
    step = environment.step(Action(f"click {two[0]:.0f}, {two[1]:.0f}"))
    assert step.terminated and step.reward == -1.0
    environment.close()


def test_text_is_typed_and_sent() -> None:
    environment = MiniWoB(task="enter-text", max_turns=5)
    task = environment.reset(seed=4, options={}).observation[0].text
    word = task.split('"')[1]
    field = middle(environment, "#tt")
    for action in (f"click {field[0]} {field[1]}", f'I will type "{word}"'):
        assert not environment.step(Action(action)).terminated
    button = middle(environment, "#subbtn")
    step = environment.step(Action(f"click {button[0]} {button[1]}"))
    assert (step.reward, step.terminated) == (1.0, True)
    environment.close()


def test_episodes_side_by_side_have_contexts_of_their_own(browser: Browser) -> None:
    def episode(seed: int) -> float:
        environment = MiniWoB(task="click-test", max_turns=2)
        start = environment.reset(seed=seed, options={})
        reward = environment.step(Action(start.info["solution"])).reward
        environment.close()
        return reward

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(episode, range(4))) == [1.0] * 4
    pages = [browser.run(browser.new_page(100, 100), 10) for _ in range(2)]
    for number, page in enumerate(pages):
        browser.run(page.goto(Path(__file__).as_uri()), 10)
        browser.run(page.evaluate(f"localStorage.setItem('name', '{number}')"), 10)
    assert [browser.run(page.evaluate("localStorage.getItem('name')"), 10) for page in pages] == ["0", "1"]
    for page in pages:
        browser.run(page.context.close(), 10)


def test_unfit_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"options\.task='no-task'"):
        build_environment("examples/miniwob/web_page.py:MiniWoB", {"task": "no-task", "max_turns": 2})


def test_a_process_that_is_killed_leaves_no_browser() -> None:
    code = (
        "from mobula.examples.miniwob.browser import Browser; import psutil, time; Browser.shared(); "
        "print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in holder.stdout.readline().split()]
    assert len(pids) > 2 and all(map(_runs, pids)), "the driver, Chromium and its processes"
    holder.kill()
    holder.wait()
    deadline = time.monotonic() + 15
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    """Whether a process works; one that has ended and was not collected does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
