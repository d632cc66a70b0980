"""Runs in place of Python for a worker of Ray: the server at a socket forks the worker. Without a server it runs here.

    python -I -S worker.py SOCKET SCRIPT [ARGUMENT]...

It imports nothing of this project and is gone once the worker runs, which has the same standard streams.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> None:
    path, *arguments = sys.argv[1:]
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}).encode()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(path)
            socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
            server.sendall(request)
            is_running = server.recv(1) != b""  # once the worker has copies of the streams
    except OSError:
        is_running = False
    if not is_running:
        os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
