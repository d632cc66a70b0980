"""A small run on a node that is short of memory by Ray's measure: its memory monitor ends every worker at once.

    python tests/integration/small_memory.py FOLDER

The threshold is far below what the node uses already, so that no memory has to be allocated, and the monitor looks
every PERIOD_S. It leaves `result.json` in its folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support")]

import mobula.deploy.host.ray_defaults  # noqa: E402, F401  isort: skip  (sets what ray reads when imported)
from small_cluster import CHECKPOINT_INTERVAL, Shape, SmallRun, start_ray  # noqa: E402
from waiting import until  # noqa: E402

from mobula.cluster.workers.faults import FAULTS_FILE, FaultFile  # noqa: E402
from mobula.cluster.workers.status import Progress  # noqa: E402

PERIOD_S = 45  # longer than the start of all roles on a busy machine
NUM_STEPS = 2 * CHECKPOINT_INTERVAL + 2
MONITOR = {"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": PERIOD_S * 1000}


def main(folder: Path) -> None:
    logging.getLogger().addHandler(FaultFile(folder / FAULTS_FILE, lambda: Progress(0, "", 0.0)))
    start_ray(tempfile.mkdtemp(prefix="mobula-", dir="/tmp"), 80 * 2**20, _system_config=MONITOR)

    async def wait_for_the_monitor(version: int) -> None:
        if version == CHECKPOINT_INTERVAL + 1:
            await until(lambda: run.losses["learner_died"] > 0, 3 * PERIOD_S)

    run = SmallRun(folder, Shape(total_steps=NUM_STEPS), on_version=wait_for_the_monitor)
    version = asyncio.run(run.go())
    result = {"version": version, "trained": run.trained, "losses": run.losses}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
