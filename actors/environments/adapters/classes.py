"""Shared parts of adapters of user environment classes: PNG encoding, an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from io import BytesIO
from typing import Any, TypeVar

from PIL import Image

T = TypeVar("T")


def as_png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.convert("RGB").save(file, format="PNG")
    return file.getvalue()


class OwnLoop:
    """Runs coroutines one at a time, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.close()
