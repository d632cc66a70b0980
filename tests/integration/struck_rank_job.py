"""`mobula train` whose learner and critic ranks, or whose driver, meet the faults that are planned in FOLDER:

python tests/integration/struck_rank_job.py FOLDER WORDS...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "integration")]

import mobula.deploy.host.ray_defaults  # noqa: E402, F401  isort: skip  (sets what ray reads when imported)
from struck_ranks import StruckCritic, StruckLearner  # noqa: E402
from struck_roles import SABOTAGE, saboteur  # noqa: E402

from mobula.configs.load import load_config  # noqa: E402
from mobula.deploy.run import runtime  # noqa: E402
from mobula.deploy.wiring import roles  # noqa: E402


def main(folder: str, words: Sequence[str]) -> int:
    os.environ[SABOTAGE] = folder
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ["PYTHONPATH"]])  # where workers find all this
    saboteur().enlist("driver")
    roles.Learner, roles.CriticRank = StruckLearner, StruckCritic
    return runtime.train(load_config(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
