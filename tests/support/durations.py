"""Updates tests/durations.json: `python tests/support/durations.py RUN.json`.

`make test-all ARGS="--store-durations --durations-path RUN.json"` writes RUN.json. Tests of less than 0.4 s are left
out, and those whose file is gone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "durations.json"
LEAST_S = 0.4

if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    kept = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    kept = {
        name: round(seconds, 1)
        for name, seconds in sorted((kept | measured).items())
        if seconds >= LEAST_S and (TARGET.parents[1] / name.partition("::")[0]).is_file()
    }
    TARGET.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
