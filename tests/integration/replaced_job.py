"""`mobula train` with roles of the tests in place of the product's:

python tests/integration/replaced_job.py ROLE=MODULE:CLASS[,ROLE=MODULE:CLASS] WORDS...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from pkgutil import resolve_name

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "integration")]
sys.path[:0] = FOLDERS

import mobula.deploy.host.ray_defaults  # noqa: E402, F401  isort: skip  (sets what ray reads when imported)
from mobula.deploy.cli import app  # noqa: E402
from mobula.deploy.wiring import roles  # noqa: E402

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ["PYTHONPATH"]])  # where workers find all this
    for word in sys.argv[1].split(","):
        role, _, replacement = word.partition("=")
        setattr(roles, role, resolve_name(replacement))
    app(["train", *sys.argv[2:]])
