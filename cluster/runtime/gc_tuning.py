"""Tunes the garbage collector and returns freed memory to the system."""

from __future__ import annotations

import ctypes
import gc

_THRESHOLDS = gc.get_threshold()
_START_UP_THRESHOLD = 100_000


def collect_rarely() -> None:
    """Collects garbage rarely until `tune_gc` is called. Imports make several hundred thousand objects that stay, and
    collections in between are a sixth of their time."""
    gc.set_threshold(_START_UP_THRESHOLD)


def tune_gc() -> None:
    """Excludes all current objects from garbage collection. Call it once a process is set up.

    Libraries leave about 400,000 objects, and each full collection visits all of them: the process stops for a quarter
    of a second in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def return_free_memory() -> None:
    """Returns freed memory to the system, if the C library can.

    glibc keeps blocks below its threshold (at most 32 MiB): for a small model, nearly the whole copy of the state.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
