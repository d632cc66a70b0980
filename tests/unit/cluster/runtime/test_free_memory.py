"""Memory that a process has freed is the system's again."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from mobula.cluster.runtime.gc_tuning import return_free_memory

BLOCK, NUM_BLOCKS = 2**18, 400  # 1 MiB each of float32, of which every second is freed


def resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_freed_tensors_between_others_are_given_back() -> None:
    """glibc cannot shrink its heap past a block in use; trimming gives back the pages between."""
    warm = torch.ones(2**22)  # freeing it raises the threshold up to which blocks come from the heap
    del warm
    kept = [torch.ones(BLOCK) for _ in range(NUM_BLOCKS)]
    del kept[::2]
    before = resident_bytes()
    return_free_memory()
    freed = NUM_BLOCKS // 2 * BLOCK * 4
    assert before - resident_bytes() > 0.8 * freed
    assert len(kept) == NUM_BLOCKS // 2
