"""The pages in a real browser: they draw, answer, load nothing from elsewhere and run no script but their own."""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_servers import reward_app, serving
from metrics_data import write_run
from PIL import Image
from score_data import PUBLISHED_OPTIONS, SIX_ROWS, record, score_rows
from waiting import wait_until

from cluster.metrics.report.report import write_report
from rewards.contract import Score
from rewards.offline.page import render_page

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
).split()
ANSWER_S = 60.0
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome here: install one to look at the report"
)


class Browser:
    """Headless Chromium, spoken to over its DevTools pipe: it reads from descriptor 3 and writes to 4."""

    def __init__(self, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()

        def attach() -> None:
            """In the child: move both ends out of the way first, so that neither overwrites the other."""
            reading, writing = (os.dup(os.dup(os.dup(end))) for end in (commands, answers))
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=attach
        )
        os.close(commands)
        os.close(answers)
        self._unread = b""
        self._num_calls = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def open(self, url: str, width: int = 1280, height: int = 1800, *, is_dark: bool = False) -> None:
        """A new page at `url`, with everything that it logs or loads recorded in `events`."""
        self.events.clear()
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read()

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self) -> np.ndarray:
        """uint8 [height, width, 3]"""
        png = base64.b64decode(self.call("Page.captureScreenshot")["data"])
        return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))

    def complaints(self) -> list[dict[str, Any]]:
        """Errors of any kind that the page caused."""
        methods = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
        return [event for event in self.events if event["method"] in methods]

    def requests(self) -> list[str]:
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._num_calls:
                assert "error" not in answer, f"{method}: {answer}"
                return answer["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _read(self) -> dict[str, Any]:
        """The next message; events are remembered as well."""
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self._unread:
            assert select.select([self._answers], [], [], deadline - time.monotonic())[0], "the browser fell silent"
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser is gone"
            self._unread += part
        line, self._unread = self._unread.split(b"\0", 1)
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    running = Browser(tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "digits-seed7"
    write_run(folder, num_steps=40)
    return write_report(folder).as_uri()


def test_every_curve_is_drawn_without_errors_and_without_the_network(browser: Browser, page: str) -> None:
    browser.open(page)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('.chart')].map(c => [c.id, Math.max(...[...c.querySelectorAll('path')]"
        ".map(p => p.getBoundingClientRect().width))])"
    )
    assert len(sizes) >= 10
    assert all(width > 250 for _, width in sizes), sizes
    assert browser.evaluate("document.images.length") >= 24
    assert browser.evaluate("[...document.images].every(i => i.naturalWidth === 56)")
    assert browser.complaints() == []
    assert browser.requests() == [page]


@pytest.mark.parametrize("is_dark", [False, True])
def test_it_looks_like_something_in_light_and_dark(browser: Browser, page: str, is_dark: bool) -> None:
    browser.open(page, is_dark=is_dark)
    picture = browser.screenshot()
    assert picture.shape == (1800, 1280, 3)
    assert (np.median(picture) < 60) == is_dark
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 200
    spread = picture.max(axis=2).astype(int) - picture.min(axis=2)
    assert (spread > 80).sum() > 2000  # the curves' own colours


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_width_needs_sideways_scrolling(browser: Browser, page: str, width: int) -> None:
    browser.open(page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_text_has_the_contrast_that_reading_needs(browser: Browser, page: str) -> None:
    script = """(() => {
      const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
        return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
      const ground = e => { for (; e; e = e.parentElement) {
        const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(', 0)')) return c; } };
      const names = 'p, dt, dd, b, small, h1, h2, h3, span, button, td, th, summary, pre';
      const texts = [...document.querySelectorAll(names)];
      return Math.min(...texts.filter(e => e.textContent.trim() && !e.hidden && e.offsetParent).map(e => {
        const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05); }));
    })()"""
    for is_dark in (False, True):
        browser.open(page, is_dark=is_dark)
        assert browser.evaluate(script) >= 4.5


def test_the_pointer_and_the_arrow_keys_read_values_off_a_curve(browser: Browser, page: str) -> None:
    browser.open(page)
    box = browser.evaluate(
        "(({x, y, width, height}) => [x, y, width, height])"
        "(document.querySelector('#chart-accuracy .plot').getBoundingClientRect())"
    )
    x, y, width, height = box
    tip = "document.querySelector('#chart-accuracy .tip')"
    assert browser.evaluate(f"{tip}.hidden")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + width * 20.5 / 41, y=y + height / 2)
    assert browser.evaluate(f"{tip}.querySelector('b').textContent") == "step 20"
    assert browser.evaluate(f"{tip}.textContent").count("held out") == 1
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert browser.evaluate(f"{tip}.hidden")
    browser.evaluate("document.querySelector('#chart-accuracy .plot').focus()")
    for key in ("Home", "ArrowRight"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert browser.evaluate(f"{tip}.querySelector('b').textContent") == "step 1"


def shown(browser: Browser) -> list[list[str]]:
    return browser.evaluate(
        "[...document.querySelectorAll('.sample')].filter(s => s.offsetParent)"
        ".map(s => [s.dataset.kind, s.dataset.period])"
    )


def test_buttons_filter_good_and_bad_samples(browser: Browser, page: str) -> None:
    browser.open(page)
    assert len(shown(browser)) == 24
    browser.evaluate("document.querySelector('button[value=worst]').click()")
    assert {kind for kind, _ in shown(browser)} == {"worst"}
    browser.evaluate("document.querySelector('button[value=late]').click()")
    assert shown(browser) == [["worst", "late"]] * 4
    assert browser.evaluate("document.querySelector('button[value=worst]').getAttribute('aria-pressed')") == "true"
    assert browser.evaluate("document.getElementById('num-shown').textContent") == "4 samples"
    browser.evaluate("document.querySelectorAll('[data-filter] button[value=\"\"]').forEach(b => b.click())")
    assert len(shown(browser)) == 24
    assert browser.complaints() == []


def test_an_address_with_a_filter_opens_filtered(browser: Browser, page: str) -> None:
    browser.open(f"{page}#kind=best&period=early")
    assert shown(browser) == [["best", "early"]] * 4


def test_a_script_in_an_answer_is_shown_and_never_run(browser: Browser, tmp_path: Path) -> None:
    hostile = "<script>window.owned = true</script><img src=x onerror='window.owned = true'>"
    write_run(tmp_path / "hostile", num_steps=3, response=hostile)
    browser.open(write_report(tmp_path / "hostile").as_uri())
    assert browser.evaluate("document.querySelector('.answer').textContent") == hostile
    assert browser.evaluate("window.owned === undefined")
    assert browser.complaints() == []


def test_even_a_script_that_got_into_the_page_is_refused_by_its_policy(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.evaluate(
        "(s => { s.textContent = 'window.owned = true'; document.body.append(s); })(document.createElement('script'))"
    )
    assert browser.evaluate("window.owned === undefined")


@pytest.mark.parametrize(("width", "is_dark"), [(360, False), (1280, True)])
def test_the_score_page_draws_without_scripts_and_fits(
    browser: Browser, tmp_path: Path, width: int, is_dark: bool
) -> None:
    hostile = record("<b>", "<script>window.owned = true</script><img src=x onerror='window.owned = true'>", "y" * 300)
    report = score_rows(tmp_path, [*SIX_ROWS, hostile], **PUBLISHED_OPTIONS)
    (tmp_path / "page.html").write_text(render_page(report))
    browser.open((tmp_path / "page.html").as_uri(), width=width, is_dark=is_dark)
    bars = browser.evaluate("[...document.querySelectorAll('rect')].map(r => r.getBoundingClientRect().height)")
    assert len(bars) > 20
    assert max(bars) > 100
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert (
        browser.evaluate("[...document.querySelectorAll('.answer')].map(a => a.textContent)").count(hostile["response"])
        == 1
    )
    assert browser.evaluate("window.owned === undefined")
    assert (np.median(browser.screenshot()) < 60) == is_dark
    assert browser.complaints() == []
    assert browser.requests() == [(tmp_path / "page.html").as_uri()]


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_run_that_ended_early_opens_without_errors(browser: Browser, tmp_path: Path, num_steps: int) -> None:
    write_run(tmp_path / "early", num_steps=num_steps, status="failed")
    browser.open(write_report(tmp_path / "early").as_uri())
    assert browser.evaluate("document.querySelector('.status').textContent") == "failed"
    assert browser.evaluate("document.querySelectorAll('.chart').length") == (1 if num_steps == 0 else 11)
    assert browser.complaints() == []


def test_the_reward_server_s_page_describes_every_path_without_the_network(browser: Browser) -> None:
    with serving(reward_app(lambda request: Score(1.0), token="s3cret")) as running:
        browser.open(f"{running.url}/docs")
        shown = "[...document.querySelectorAll('.opblock-summary-path')].map(p => p.dataset.path)"
        wait_until(lambda: browser.evaluate(shown), ANSWER_S, lambda: "the page stays empty")
        assert set(browser.evaluate(shown)) == {"/score", "/lightrft", "/health", "/metrics"}
        assert browser.complaints() == []
        assert all(url.startswith(running.url) for url in browser.requests()), browser.requests()
