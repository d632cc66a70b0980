"""Imports modules once and forks workers, which have them. It ends when its standard input is closed.

    python -m mobula.deploy.preloading.server FOLDER DESCRIPTOR MODULE[,MODULE]... [DESCRIPTOR MODULE[,MODULE]...]...

Each descriptor is a listening socket in FOLDER, which is removed at the end. Workers of each further socket also have
the modules of the sockets before it: a fork of the server continues with them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import sys
from collections.abc import Sequence

SIZE_BYTES = 4


def main() -> None:
    # Ray's library reads the environment of the worker when it is loaded: the import fails until the fork.
    sys.modules["ray"] = None  # type: ignore[assignment]  # what `import` looks for
    gc.disable()  # a sixth of the time of imports
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    folder, *stages = sys.argv[1:]
    pairs = zip(stages[::2], stages[1::2], strict=True)
    serve([(socket.socket(fileno=int(descriptor)), names.split(",")) for descriptor, names in pairs])
    shutil.rmtree(folder, ignore_errors=True)


def serve(stages: Sequence[tuple[socket.socket, Sequence[str]]]) -> None:
    (listener, names), *later = stages
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    if later and os.fork() == 0:
        listener.close()
        return serve(later)
    for other, _ in later:
        other.close()
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                run(connection)


def run(connection: socket.socket) -> None:
    """Becomes the worker: runs the requested script with its streams, environment, directory and arguments."""
    size, streams, _, _ = socket.recv_fds(connection, SIZE_BYTES, 3)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += connection.recv(1 << 20)
    request = json.loads(text)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setpgid(0, 0)  # Ray signals the process group of a worker that ended: it must hold no other worker
    connection.sendall(b"1")
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    import numpy as np
    import torch

    # As these libraries did when they were imported: they read the number of threads and seeded generators.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    np.random.seed(random.getrandbits(32))  # the generator of code that asks for no other
    script = request["arguments"][0]
    sys.argv[:] = request["arguments"]
    sys.path[0] = os.path.dirname(script)
    del sys.modules["ray"]
    gc.enable()
    runpy.run_path(script, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    main()
