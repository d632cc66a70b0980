"""`mobula train` whose engines' cores run on threads of the rollout actors or, as on GPUs, in processes of their own:

python tests/load/load_job.py thread|process WORDS...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
OURS = [str(TESTS.parent), str(TESTS / "support")]
sys.path[:0] = OURS

import mobula.deploy.host.ray_defaults  # noqa: E402, F401  isort: skip  (sets what ray reads when imported)
from engine_cores import CoreApart  # noqa: E402

from mobula.configs.load import load_config  # noqa: E402
from mobula.deploy.run import runtime  # noqa: E402
from mobula.deploy.wiring import roles  # noqa: E402


def main(core: str, words: Sequence[str]) -> int:
    os.environ["PYTHONPATH"] = os.pathsep.join([*OURS, os.environ["PYTHONPATH"]])  # where workers find all this
    if core == "process":
        roles.RolloutActor = CoreApart
    return runtime.train(load_config(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
