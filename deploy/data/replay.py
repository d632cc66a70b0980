"""`mobula replay`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mobula.deploy.host.session import ray_session  # isort: skip  (sets what ray reads when imported)
import ray
from safetensors.torch import load_file
from torch import Tensor

from mobula.cluster.errors import PreflightError
from mobula.cluster.replay.buffer import LiveGroups
from mobula.cluster.replay.trajectory_log import TrajectoryLog, recorded_steps, train_again
from mobula.cluster.roles import UpdateReport
from mobula.cluster.runtime.placement import plan_placement, training_roles
from mobula.cluster.runtime.placement_groups import create_placement_groups, remove_placement_groups
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import file_access, run_lock
from mobula.deploy.host.terminal import outlive_output, terminal
from mobula.deploy.preflight.findings import refusing
from mobula.deploy.wiring.build import POLICY_FOLDER
from mobula.deploy.wiring.persistence import trajectory_log
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.roles import learner_group, supervised_rows
from mobula.deploy.wiring.spawner import Spawner

OUTPUT_FOLDER = "replay"  # of the run folder
UPDATES_FILE = "updates.jsonl"
VERSION_ZERO = Path("checkpoints") / "step-000000"


def replay(run_folder: Path, config: RunConfig) -> int:
    """Train a learner on the run's recorded steps, from its version 0; returns the exit code.

    Leaves the policy and the numbers of each update below `replay/` in the run folder, and compares the policy with the
    run's own if the run came to its end.
    """
    outlive_output()
    console, output = terminal(), run_folder / OUTPUT_FOLDER
    log = trajectory_log(run_folder, config)
    log.check(recorded_steps(log))
    if not (run_folder / VERSION_ZERO).is_dir():
        raise PreflightError(f"{run_folder / VERSION_ZERO} is missing: a replay begins with the run's version 0")
    with file_access(config), run_lock(output):
        prepared = prepare(config, ray.put)
        assert isinstance(prepared, Prepared), "offline jobs keep no log"
        with learner_place(config) as spawner:
            version = asyncio.run(_replay(run_folder, prepared, spawner, log))
    console.print(f"{version} steps trained again: {output / POLICY_FOLDER}", soft_wrap=True)
    if (run_folder / POLICY_FOLDER).is_dir() and version == config.num_steps:
        gap = largest_difference(output / POLICY_FOLDER, run_folder / POLICY_FOLDER)
        console.print(f"largest difference of a weight from the run's own policy: {gap:g}")
    return 0


def largest_difference(folder: Path, other: Path) -> float:
    """Returns the largest weight difference of two Hugging Face checkpoints; infinite if names or shapes differ."""
    ours, theirs = _weights(folder), _weights(other)
    if {name: t.shape for name, t in ours.items()} != {name: t.shape for name, t in theirs.items()}:
        return float("inf")
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@contextmanager
def learner_place(config: RunConfig) -> Iterator[Spawner]:
    """The resources of the learner, and of a critic that has its own, while the body runs."""
    with ray_session(config) as session:
        plan = plan_placement(config.resources, session.nodes, training_roles(config))
        bookings = create_placement_groups(plan, run_name=config.name, timeout_s=config.timeouts.start_s)
        try:
            yield Spawner(config, session, plan, bookings)
        finally:
            remove_placement_groups(bookings)


async def _replay(run_folder: Path, prepared: Prepared, spawner: Spawner, log: TrajectoryLog) -> int:
    learner = learner_group(prepared, spawner, supervised_rows(prepared))
    source = prepared.source()
    output = run_folder / OUTPUT_FOLDER
    try:
        with refusing():  # the configuration may not fit the model
            await learner.start()
        await learner.load(run_folder / VERSION_ZERO / "learner")
        with (output / UPDATES_FILE).open("w", encoding="utf-8") as updates:

            def write(report: UpdateReport) -> None:
                updates.write(json.dumps({"step": report.version, **report.metrics}) + "\n")

            version = await train_again(learner, log, LiveGroups(source, ray.put), write)
        await learner.export(output / POLICY_FOLDER)
    finally:
        await learner.close()
    return version
