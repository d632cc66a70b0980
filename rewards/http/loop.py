"""LoopThread: an event loop in a separate thread, for callers in several threads without a loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Closer = Callable[[], Awaitable[None]]
CLOSE_S = 2.0


class LoopThread:
    """Runs coroutines for any thread. The daemon thread ends with this object or with the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closers: list[Closer] = []
        thread = threading.Thread(target=_serve, args=(self._loop, self._closers), name=name, daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _stop, self._loop, thread)

    def at_close(self, closer: Closer) -> None:
        """Registers `closer`, which the loop awaits at its end."""
        self._closers.append(closer)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a coroutine, which has its own deadline."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # the waiting call was interrupted; without effect on a finished coroutine


def _serve(loop: asyncio.AbstractEventLoop, closers: list[Closer]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        for closer in closers:
            loop.run_until_complete(closer())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():  # the garbage collector may call this in any thread
        thread.join(CLOSE_S)
