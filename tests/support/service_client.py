"""The official client of the training service, whose end has a deadline."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import tinker

CLOSE_S = 15.0


class Client(tinker.ServiceClient):
    """The poller of tinker 0.38 can lose the cancellation of its task: `close` then waits without end."""

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        with suppress(TimeoutError):
            self.close("success" if kind is None else "errored").result(CLOSE_S)
