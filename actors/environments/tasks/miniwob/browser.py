"""Browser: one headless Chromium a process, with a context of its own for every page, asked over a pipe.

Chromium ends when its pipe closes, so a process that is killed leaves no browser behind.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Json = dict[str, Any]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--disable-renderer-backgrounding",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # pages are files, and reach nothing else
)
# Puts two descriptors at 3 and 4, where Chromium reads and writes, and becomes Chromium.
LAUNCHER = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 5) for n in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
MAX_MESSAGE_BYTES = 64 << 20
END_S = 5.0


class BrowserError(RuntimeError):
    """Chromium ended, or it refuses a command."""


class Browser:
    """Shared by all pages of a process. Methods of pages block; use them from threads.

    Raises:
        ValueError: there is no Chromium on this machine.
    """

    _one: Browser | None = None
    _making = threading.Lock()

    def __init__(self, path: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mobula-browser-", ignore_cleanup_errors=True)
        to_read, their_write = os.pipe()
        their_read, to_write = os.pipe()
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # it does not start as root with one
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-S", "-E", "-c", LAUNCHER, str(their_read), str(their_write)),
                *(path, *FLAGS, *sandbox, f"--user-data-dir={self._folder.name}", "about:blank"),
            ],
            pass_fds=(their_read, their_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        self._to_read, self._to_write = to_read, to_write
        self._answers: dict[int, asyncio.Future[Json]] = {}
        self._events: dict[tuple[str, str], asyncio.Future[Json]] = {}  # by session and name
        self._number = 0
        self._error: BrowserError | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="browser", daemon=True)
        self._thread.start()
        self.run(self._open(), 30.0)

    @classmethod
    def shared(cls) -> Browser:
        """The browser of this process; a new one if there is none or it has ended."""
        with cls._making:
            if cls._one is None or not cls._one.is_alive:
                cls._one = cls(find_chromium())
            return cls._one

    @property
    def is_alive(self) -> bool:
        return self._error is None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Raises: TimeoutError: it took longer."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout_s), self._loop).result()

    async def send(self, method: str, params: Mapping[str, Any], session: str = "") -> Json:
        """The result of a command.

        Raises:
            BrowserError: it is refused, or the browser has ended.
        """
        if self._error is not None:
            raise self._error
        self._number += 1
        number = self._number
        message: Json = {"id": number, "method": method, "params": dict(params)}
        if session:
            message["sessionId"] = session
        self._answers[number] = self._loop.create_future()
        try:
            self._writer.write(json.dumps(message).encode() + b"\0")
            await self._writer.drain()
            answer = await self._answers[number]
        except (ConnectionError, BrokenPipeError) as error:
            raise self._ended() from error
        finally:
            del self._answers[number]
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error'].get('message', answer['error'])}")
        return answer["result"]

    def expect(self, session: str, event: str) -> asyncio.Future[Json]:
        """The next event of this name in this session; to be called in the browser's loop, before its cause."""
        self._events[session, event] = self._loop.create_future()
        return self._events[session, event]

    def close(self) -> None:
        """End Chromium and what it has written."""
        if self._error is None:
            self._loop.call_soon_threadsafe(self._writer.close)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        self._folder.cleanup()

    async def _open(self) -> None:
        reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        await self._loop.connect_read_pipe(lambda: protocol, os.fdopen(self._to_read, "rb"))
        transport, flow = await self._loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(self._to_write, "wb")
        )
        self._writer = asyncio.StreamWriter(transport, flow, None, self._loop)
        self._listening = self._loop.create_task(self._listen(reader))
        await self.send("Browser.getVersion", {})

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    waiting = self._answers.get(message["id"])
                else:
                    waiting = self._events.pop((message.get("sessionId", ""), message["method"]), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._error = self._ended()
        except asyncio.LimitOverrunError as error:
            self._error = BrowserError(f"a message of Chromium is too large: {error}")
        for waiting in (*self._answers.values(), *self._events.values()):
            if not waiting.done():
                waiting.set_exception(self._error)

    def _ended(self) -> BrowserError:
        return BrowserError(f"Chromium has ended ({self._process.poll()})")


class Page:
    """A tab in a context of its own: cookies, storage and focus are those of no other page."""

    def __init__(self, browser: Browser, *, width: int, height: int, timeout_s: float) -> None:
        self._browser, self._timeout_s = browser, timeout_s
        self._context, self._session = browser.run(self._open(width, height), timeout_s)

    def goto(self, url: str) -> None:
        """Load a page, scripts included."""
        self._browser.run(self._goto(url), self._timeout_s)

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, of a promise if it is one.

        Raises:
            BrowserError: it throws.
        """
        return self._browser.run(self._evaluate(expression), self._timeout_s)

    def screenshot(self, width: int, height: int) -> bytes:
        """The upper left part of the page as PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self._browser.run(self._send("Page.captureScreenshot", format="png", clip=clip), self._timeout_s)
        return base64.b64decode(found["data"])

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at `start` and release it at `end`; a click where both are equal."""
        self._browser.run(self._drag(start, end), self._timeout_s)

    def type_text(self, text: str) -> None:
        """Type into what has the focus."""
        self._browser.run(self._send("Input.insertText", text=text), self._timeout_s)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key; `code` is its virtual key code, `text` what it writes."""
        self._browser.run(self._press(key, code, text), self._timeout_s)

    def close(self) -> None:
        """Close the context, unless the browser has ended."""
        if self._browser.is_alive:
            closing = self._browser.send("Target.disposeBrowserContext", {"browserContextId": self._context})
            self._browser.run(closing, self._timeout_s)

    async def _open(self, width: int, height: int) -> tuple[str, str]:
        browser = self._browser
        context = (await browser.send("Target.createBrowserContext", {}))["browserContextId"]
        size = {"width": width, "height": height}
        made = await browser.send("Target.createTarget", {"url": "about:blank", "browserContextId": context, **size})
        attached = {"targetId": made["targetId"], "flatten": True}
        session = (await browser.send("Target.attachToTarget", attached))["sessionId"]
        await browser.send("Page.enable", {}, session)
        metrics = {**size, "deviceScaleFactor": 1, "mobile": False}
        await browser.send("Emulation.setDeviceMetricsOverride", metrics, session)
        return context, session

    async def _send(self, method: str, **params: Any) -> Json:
        return await self._browser.send(method, params, self._session)

    async def _goto(self, url: str) -> None:
        loaded = self._browser.expect(self._session, "Page.loadEventFired")
        found = await self._send("Page.navigate", url=url)
        if found.get("errorText"):
            raise BrowserError(f"{url} cannot be loaded: {found['errorText']}")
        await loaded

    async def _evaluate(self, expression: str) -> Any:
        found = await self._send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise BrowserError(f"{expression[:80]}: {found['exceptionDetails'].get('text', 'it throws')}")
        return found["result"].get("value")

    async def _drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        async def mouse(kind: str, at: tuple[float, float], held: int) -> None:
            pressed = {"button": "left", "buttons": held, "clickCount": int(kind != "mouseMoved")}
            await self._send("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **pressed)

        await mouse("mouseMoved", start, 0)
        await mouse("mousePressed", start, 1)
        if end != start:
            await mouse("mouseMoved", ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2), 1)
            await mouse("mouseMoved", end, 1)
        await mouse("mouseReleased", end, 0)

    async def _press(self, key: str, code: int, text: str) -> None:
        names = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self._send("Input.dispatchKeyEvent", type="keyDown", **names, **({"text": text} if text else {}))
        await self._send("Input.dispatchKeyEvent", type="keyUp", **names)


def find_chromium() -> str:
    """Raises: ValueError: there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise ValueError(f"there is no {NAMES[0]} on this machine: install one, e.g. apt-get install chromium")
    return found
