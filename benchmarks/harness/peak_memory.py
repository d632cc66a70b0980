"""Peak resident memory of this process.

`getrusage` is no use for it: a child starts with the peak of the process that started it.
"""

from __future__ import annotations

import re
from pathlib import Path

STATUS, CLEAR_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes() -> int:
    """The largest resident memory since the program started, or since `restart_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    assert found is not None, f"{STATUS} has no VmHWM: run this benchmark on Linux"
    return int(found[1]) * 1024


def restart_peak() -> int:
    """Bytes in use now, from which the peak is measured on."""
    CLEAR_PEAK.write_text("5")
    return peak_bytes()
