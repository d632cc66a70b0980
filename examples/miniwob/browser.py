"""Browser: a headless Chromium for each process, driven by playwright on a separate thread.

Playwright's driver and Chromium end with the process, also if it is killed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from playwright.async_api import Page, async_playwright

T = TypeVar("T")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # pages are local files without network access
)
START_S = 30.0
END_S = 5.0


class Browser:
    """Shared by all pages of a process.

    Raises:
        ValueError: there is no Chromium on this machine.
    """

    _one: Browser | None = None
    _making = threading.Lock()

    def __init__(self, path: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="browser", daemon=True)
        self._thread.start()
        self.run(self._open(path), START_S)

    @classmethod
    def shared(cls) -> Browser:
        """The browser of this process; starts one if there is none or it has ended."""
        with cls._making:
            if cls._one is None or not cls._one.is_alive:
                cls._one = cls(find_chromium())
            return cls._one

    @property
    def is_alive(self) -> bool:
        return self._chromium.is_connected()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine on the browser's loop and returns the result.

        Raises:
            TimeoutError: the coroutine took longer than `timeout_s`.
        """
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout_s), self._loop).result()

    async def new_page(self, width: int, height: int) -> Page:
        """Opens a page in a new context, which shares no cookies, storage or focus."""
        context = await self._chromium.new_context(viewport={"width": width, "height": height})
        return await context.new_page()

    def close(self) -> None:
        """Ends Chromium and playwright's driver."""
        self.run(self._close(), END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)

    async def _open(self, path: str) -> None:
        self._playwright = await async_playwright().start()
        self._chromium = await self._playwright.chromium.launch(
            executable_path=path,
            args=FLAGS,
            chromium_sandbox=os.geteuid() != 0,  # as root, Chromium starts only without a sandbox
        )

    async def _close(self) -> None:
        await self._chromium.close()
        await self._playwright.stop()


def find_chromium() -> str:
    """Raises: ValueError: Chromium is not installed."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise ValueError(f"there is no {NAMES[0]} on this machine: install one, e.g. apt-get install chromium")
    return path
