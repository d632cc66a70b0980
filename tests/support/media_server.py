"""A web server on loopback that gives files and notes what it is asked."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@dataclass
class MediaServer:
    """Requests of a running server. The first `num_together` of them wait for each other, at most 10 s."""

    files: Mapping[str, bytes]  # by path; others are answered with 404
    num_together: int = 1
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.together = threading.Barrier(self.num_together)


@contextmanager
def media_server(files: Mapping[str, bytes], num_together: int = 1) -> Iterator[MediaServer]:
    """The server, until the block ends."""
    found = MediaServer(files, num_together)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            if len(found.asked) <= found.num_together:
                found.together.wait(10)
            content = found.files.get(self.path)
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: Any) -> None:
            """Nothing is written to the console."""

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    found.url = f"http://127.0.0.1:{running.server_address[1]}"
    try:
        yield found
    finally:
        running.shutdown()
        running.server_close()
