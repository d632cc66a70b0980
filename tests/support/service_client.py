"""The official client of the training service, whose end has a deadline, and what its tests share."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

import tinker
from waiting import wait_until_served

CLOSE_S = 15.0
KEY = "tml-a-key-of-the-tests"


class Client(tinker.ServiceClient):
    """The poller of tinker 0.38 can lose the cancellation of its task: `close` then waits without end."""

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        with suppress(TimeoutError):
            self.close("success" if kind is None else "errored").result(CLOSE_S)


def connect(url: str, key: str = KEY) -> Any:
    return Client(base_url=url, api_key=key)


def train_at(client: Any, rows: list[Any], steps: int, loss: str = "cross_entropy", *, rate: float) -> list[float]:
    """Losses of `steps` steps at this learning rate."""
    losses = []
    for _ in range(steps):
        computed = client.forward_backward(rows, loss)
        stepped = client.optim_step(tinker.types.AdamParams(learning_rate=rate))
        losses.append(computed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def wait_until_up(process: subprocess.Popen[bytes], port: int, wait_s: float) -> None:
    wait_until_served(f"http://127.0.0.1:{port}/health", process, wait_s, lambda: "the service does not start")
