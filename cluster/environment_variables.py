"""Environment variables: of workers that compute, and of this process for a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Threads of OpenMP that wait for each other spin for microseconds, then sleep. By default they spin for milliseconds:
# where other processes run on the same cores, a step with two threads then takes several times as long. Without any
# spinning, small operations wait for threads to wake up: a step of a small model on free cores takes 1.4 times as long.
SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}

UMASK = "MOBULA_UMASK"  # of the workers of a run, in octal digits: a cluster starts them with its own


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets these variables while the body runs, and restores the former values afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
