"""`mobula train` whose engines' cores are processes of their own, and whose actors or cores meet faults:

    python tests/integration/struck_job.py FOLDER MOMENT-VICTIM-SIGNAL,MOMENT-VICTIM-SIGNAL,... WORDS...

A victim is `core` or `actor`. One fault after the other, each once every engine serves again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "integration")]

import mobula.deploy.host.ray_defaults  # noqa: E402, F401  isort: skip  (sets what ray reads when imported)
from struck_roles import ACTOR, CORE, SABOTAGE, StruckRollout, saboteur  # noqa: E402
from waiting import until  # noqa: E402

from mobula.cluster.metrics import hub  # noqa: E402
from mobula.cluster.rollout.evaluation import Evaluator  # noqa: E402
from mobula.cluster.rollout.rollout_pool import RolloutPool  # noqa: E402
from mobula.cluster.workers.status import WorkerState  # noqa: E402
from mobula.configs.load import load_config  # noqa: E402
from mobula.deploy.run import runtime  # noqa: E402
from mobula.deploy.wiring import persistence, roles  # noqa: E402

BACK_S = 240.0
# Every moment of the fault matrix comes after a version was evaluated and before the next but one is.
STEPS_PER_FAULT = int(os.environ.get("MOBULA_TEST_STEPS_PER_FAULT", "2"))
PHASES = {"reference": "in_reference", "update": "in_update", "checkpoint": "in_checkpoint"}


class KnownRolloutPool(RolloutPool):
    """The run's, readable by every role."""

    only: KnownRolloutPool

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        KnownRolloutPool.only = self


class StruckScope(hub.MeasuredStep):
    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        with super().timed(phase):
            if phase in PHASES:  # in a thread: who slows a victim down waits for it, and the driver must not
                threading.Thread(target=saboteur().moment, args=(PHASES[phase],)).start()
            yield


class PlanningEvaluator(Evaluator):
    """Waits until all is well again before it plans the next fault."""

    faults: dict[int, tuple[str, str, signal.Signals]] = {}  # moment, victim and kind, by version

    async def maybe_run(self, version: int) -> None:
        await super().maybe_run(version)
        if version in self.faults:
            await until(_is_whole, BACK_S)
            moment, victim, kind = self.faults.pop(version)
            saboteur().plan(moment, victim=victim, signal=kind)


def _is_whole() -> bool:
    return all(w.state is WorkerState.SERVING for w in KnownRolloutPool.only.status()) and all(
        saboteur().is_there(victim) for victim in (CORE, ACTOR)
    )


def main(folder: str, faults: str, words: Sequence[str]) -> int:
    os.environ[SABOTAGE] = folder
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])  # where its workers find all this
    planned = [fault.split("-") for fault in faults.split(",")]
    PlanningEvaluator.faults = {
        1 + STEPS_PER_FAULT * number: (moment, victim, signal.Signals[kind])
        for number, (moment, victim, kind) in enumerate(planned)
    }
    roles.RolloutActor, roles.RolloutPool = StruckRollout, KnownRolloutPool
    persistence.Evaluator, hub.MeasuredStep = PlanningEvaluator, StruckScope
    num_steps = 2 + STEPS_PER_FAULT * len(planned)
    return runtime.train(load_config([*words, f"num_steps={num_steps}"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
