"""`mobula train` with real engines whose core raises whenever it begins one given prompt:

    python tests/integration/poisoned_job.py PROMPT_ID WORDS...

PROMPT_ID may be the first part of an id: `0/5/` is the sixth prompt of the first epoch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = [str(TESTS.parent), str(TESTS / "support")]
sys.path[:0] = FOLDERS

import mobula.deploy.host.ray_defaults  # noqa: E402, F401  isort: skip  (sets what ray reads when imported)
from engine_cores import POISON, Poisoned  # noqa: E402

from mobula.deploy.cli import app  # noqa: E402
from mobula.deploy.wiring import roles  # noqa: E402

if __name__ == "__main__":
    os.environ[POISON] = sys.argv[1]
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ["PYTHONPATH"]])  # where workers find all this
    roles.RolloutActor = Poisoned
    app(["train", *sys.argv[2:]])
