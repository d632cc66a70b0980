"""Headless Chromium for tests that look at pages."""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
).split()
ANSWER_S = 60.0


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
        return [event for event in self._of_this_page() if event["method"] in methods]

    def requests(self) -> list[str]:
        asked = (event for event in self._of_this_page() if event["method"] == "Network.requestWillBeSent")
        sent = [event["params"]["request"]["url"] for event in asked]
        return [url for url in sent if not url.startswith("data:")]

    def _of_this_page(self) -> list[dict[str, Any]]:
        """Pages that earlier tests opened stay open and go on sending events."""
        return [event for event in self.events if event.get("sessionId") == self._session]

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
