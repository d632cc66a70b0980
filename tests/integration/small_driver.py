"""The driver of a small run as a process of its own, that something may happen to:

    python tests/integration/small_driver.py FOLDER STEPS ADDRESS [MOMENT SIGNAL]...

It joins the cluster at ADDRESS. What comes to it comes once the run has gone on for a few steps, one thing after the
other. At its end it leaves `result.json` in its folder.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support")]

import mobula.deploy.host.ray_defaults  # noqa: E402, F401  isort: skip  (sets what ray reads when imported)
import ray  # noqa: E402
from sabotage import Saboteur  # noqa: E402
from small_cluster import STEPS_PER_ROUND, Shape, SmallRun  # noqa: E402

NUM_STEPS_BEFORE = 2


def main(folder: Path, num_steps: int, address: str, faults: Sequence[tuple[str, signal.Signals]]) -> None:
    saboteur = Saboteur(folder)
    saboteur.enlist("driver")
    visited: list[int] = []
    by_visit = {NUM_STEPS_BEFORE + STEPS_PER_ROUND * number: fault for number, fault in enumerate(faults)}

    async def plan(version: int) -> None:
        if len(visited) in by_visit:
            moment, sign = by_visit[len(visited)]
            saboteur.plan(moment, victim="driver", signal=sign)
        visited.append(version)

    ray.init(address=address, namespace=f"driver-{folder.name}", log_to_driver=False)
    run = SmallRun(folder, Shape(total_steps=num_steps, num_engines=1, num_rewards=1), on_version=plan)
    version = asyncio.run(run.go())
    result = {"version": version, "began": visited[0], "recovered": run.recovered, "losses": run.losses}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    folder, steps, cluster, *what = sys.argv[1:]
    signs = [signal.Signals(int(number)) for number in what[1::2]]
    main(Path(folder), int(steps), cluster, list(zip(what[::2], signs, strict=True)))
