"""Shared parts of adapters of a user's environment class: finding the class, PIL pictures, an event loop of its own."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine
from io import BytesIO
from typing import Any, TypeVar

from PIL import Image

T = TypeVar("T")


def class_at(target: str) -> Any:
    """The object at `module:Class`.

    Raises:
        ValueError: there is none.
    """
    module, colon, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name) if colon and name else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"options.target={target!r} cannot be imported ({error}): put it on the PYTHONPATH") from error
    if found is None:
        raise ValueError(f"options.target={target!r} names no class: write module:Class")
    return found


def as_png(picture: Image.Image) -> bytes:
    file = BytesIO()
    picture.convert("RGB").save(file, format="PNG")
    return file.getvalue()


class OwnLoop:
    """Runs coroutines one at a time, from whichever thread asks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.close()
