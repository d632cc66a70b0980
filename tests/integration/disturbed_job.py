"""`mobula train` whose learner has a disturbed vision tower:

python tests/integration/disturbed_job.py WORDS...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = [str(TESTS.parent), str(TESTS / "support")]
sys.path[:0] = FOLDERS

import mobula.deploy.host.ray_defaults  # noqa: E402, F401  isort: skip  (sets what ray reads when imported)
from disturbed import DisturbedLearner  # noqa: E402

from mobula.deploy.cli import app  # noqa: E402
from mobula.deploy.wiring import roles  # noqa: E402

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ["PYTHONPATH"]])  # where workers find all this
    roles.Learner = DisturbedLearner
    app(["train", *sys.argv[1:]])
