"""Address, bearer token and server loop of the commands that serve HTTP."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from mobula.cluster.errors import PreflightError
from mobula.cluster.proxies import is_loopback
from mobula.configs.errors import ConfigError

PENDING_CONNECTIONS = 512


@dataclass(frozen=True)
class Address:
    """Listen address and bearer token of requests; a token of None admits all requests."""

    host: str
    port: int
    token: str | None

    def listen(self) -> socket.socket:
        """A listening socket.

        Raises:
            PreflightError: the address is taken, not of this machine, or open to other machines without a token.
        """
        if self.token is None and not is_loopback(self.host):
            raise PreflightError(
                f"--host {self.host} is reached from other machines, and there is no token: give --token-env or "
                "--token-file, or listen on 127.0.0.1"
            )
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=PENDING_CONNECTIONS)
        except (OSError, OverflowError) as error:
            message = f"{self.host}:{self.port} cannot be listened on ({error}): give another --host or --port"
            raise PreflightError(message) from error


def run_server(app: Any, listener: socket.socket, *, grace_s: int, announce: Callable[[str], None]) -> None:
    """Serve an ASGI application until SIGTERM or SIGINT; requests in flight then have `grace_s` to finish.

    `announce` receives the URL.
    """
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=grace_s))
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again once it has shut down
        signal.signal(number, lambda *_: None)
    host, port = listener.getsockname()[:2]
    announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    server.run(sockets=[listener])


def read_token(env: str | None, file: Path | None) -> str | None:
    """The bearer token from an environment variable or a file; None if neither is given.

    Raises:
        ConfigError: the source holds no token, or both are given.
    """
    if env is not None and file is not None:
        raise ConfigError("--token-env and --token-file both name a token: give one of them")
    if env is not None:
        token = os.environ.get(env, "")
    elif file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {file} cannot be read ({error}): give a file with the token") from error
    else:
        return None
    if not token:
        raise ConfigError(f"{env or file} holds no token: set it before the server starts")
    return token
