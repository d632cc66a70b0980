"""Keeps the long tests of a stored run: `python tests/support/durations.py RUN.json` updates tests/durations.json.

make test-all ARGS="--store-durations --durations-path RUN.json"
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "durations.json"
LEAST_S = 1.0

if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    kept = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    is_there = lambda name: (TARGET.parents[1] / name.partition("::")[0]).is_file()  # noqa: E731
    kept = {name: s for name, s in (kept | measured).items() if s >= LEAST_S and is_there(name)}
    rounded = {name: round(seconds, 1) for name, seconds in sorted(kept.items())}
    TARGET.write_text(json.dumps(rounded, indent=0) + "\n", encoding="utf-8")
