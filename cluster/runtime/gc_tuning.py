"""Memory of a process: the garbage collector, and freed memory that the allocator keeps."""

from __future__ import annotations

import ctypes
import gc


def tune_gc() -> None:
    """Exclude all current objects from garbage collection; call it once a process is set up.

    Libraries leave some 400,000 objects behind, and each full collection looks at all of them: a quarter of a second in
    which the process does nothing else, in the middle of a step.
    """
    gc.collect()
    gc.freeze()


def return_free_memory() -> None:
    """Give freed memory back to the system, where the C library can.

    glibc keeps blocks below its threshold, at most 32 MiB: of a copy of a small model's state that is nearly all.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
