"""Headless Chromium of the system, driven by playwright, for tests that look at pages."""

from __future__ import annotations

import io
import shutil
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
ANSWER_S = 60.0


class Browser:
    """One page at a time, with what it complained about and asked for."""

    page: Page

    def __init__(self) -> None:
        self._playwright = sync_playwright().start()
        flags = ["--no-sandbox", "--disable-gpu", "--disable-quic"]
        self._chromium = self._playwright.chromium.launch(executable_path=CHROMIUM, args=flags)

    def open(self, url: str, width: int = 1280, height: int = 1800, *, is_dark: bool = False) -> None:
        """A new page at `url`, once it is loaded."""
        for context in self._chromium.contexts:
            context.close()
        context = self._chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if is_dark else "light"
        )
        self.page = context.new_page()
        self.page.set_default_timeout(1000 * ANSWER_S)
        self.complaints: list[str] = []
        self._requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._requests.append(request.url))
        self.page.goto(url)

    def evaluate(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def screenshot(self) -> np.ndarray:
        """uint8 [height, width, 3]"""
        return np.asarray(Image.open(io.BytesIO(self.page.screenshot())).convert("RGB"))

    def requests(self) -> list[str]:
        return [url for url in self._requests if not url.startswith("data:")]

    def close(self) -> None:
        self._chromium.close()
        self._playwright.stop()
