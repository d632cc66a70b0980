"""`mobula train` as a user starts it: a process of its own, with everything that it starts to be found again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from waiting import wait_until

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.configs.overrides import overridden

REPOSITORY = Path(__file__).parents[2]
MARK = "MOBULA_TEST_RUN"  # in the environment of every process of one run, and of no other
RUN_DEADLINE_S = 600.0
GONE_DEADLINE_S = 150.0
MOBULA = ("-m", "mobula.deploy.cli")
NUM_SAMPLES = 8
PROMPTS_PER_STEP = 4
REWARD = '''
"""A reward that differs between siblings from the first step on, so that there is something to learn at once."""

def score(request, **options):
    return float(len(request.response.text) % 2)
'''
BARE = ("resources.object_store_bytes=268435456", "metrics.progress=false", "timeouts.start_s=500")
SMALL = (
    "rewards.components.0.function=job_reward:score", "warm_start.num_steps=2", "warm_start.batch_size=16",
    "warm_start.check_interval=2", "warm_start.max_checks_rows=8", "evaluation.num_prompts=16",
    f"algorithm.prompts_per_step={PROMPTS_PER_STEP}", f"algorithm.samples_per_prompt={NUM_SAMPLES}",
    "algorithm.max_concurrent_groups=8", *BARE,
)  # fmt: skip


# Of runs that are compared: one group is sampled at a time, so that numbers do not depend on the requests beside it.
REPEATABLE = ("experiment=digits", "resources=laptop", "sampler=huggingface", "sampler.max_tokens=8")
REPEATABLE += ("algorithm.max_staleness=0", "checkpoints.interval_steps=2", "replay.trajectory_log=true")


@dataclass
class Job:
    """One `mobula train` command, which may be started more than once; each start has a mark of its own."""

    folder: Path
    overrides: tuple[str, ...]
    small: tuple[str, ...] = SMALL
    directory: Path = REPOSITORY  # the command's working directory
    marks: list[str] = field(default_factory=list)

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "job"

    def start(self, *command: str) -> subprocess.Popen[str]:
        """In a process group of its own, so that no signal of ours reaches anything else; `command` takes the words
        that `mobula train` takes."""
        self.write_reward()
        words = [f"folder={self.folder / 'runs'}", "name=job", f"policy.model={self.folder / 'model'}", *self.overrides]
        return self._start(*(command or (*MOBULA, "train")), *overridden(self.small, words))

    def start_script(self, *words: str) -> subprocess.Popen[str]:
        """A script with these words and no others."""
        return self._start(*words)

    def write_reward(self) -> None:
        (self.folder / "job_reward.py").write_text(REWARD)

    def start_command(self, *words: str) -> subprocess.Popen[str]:
        """Any `mobula` command, in the same surroundings."""
        return self._start(*MOBULA, *words)

    def _start(self, *words: str) -> subprocess.Popen[str]:
        self.marks.append(uuid.uuid4().hex)
        with (self.folder / "output.txt").open("a") as output:
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=self.directory,
                env={**os.environ, MARK: self.marks[-1], "PYTHONPATH": str(self.folder)},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                umask=0o022,  # the usual one
            )

    def finish(self, process: subprocess.Popen[str], deadline_s: float = RUN_DEADLINE_S) -> None:
        assert process.wait(deadline_s) == 0, self.output

    def done(self, num_steps: int) -> RunFolder:
        """What it left, whose steps are all done."""
        found = read_run_folder(self.run_folder)
        assert (found.summary.status, found.summary.version) == ("done", num_steps), self.output
        return found

    def trained(self, num_steps: int, *command: str) -> RunFolder:
        """What it leaves after all of its steps."""
        self.finish(self.start(*command))
        return self.done(num_steps)

    def wait(
        self, process: subprocess.Popen[str], condition: Callable[[], object], deadline_s: float = RUN_DEADLINE_S
    ) -> None:
        """Until the condition holds, while the process goes on."""
        wait_until(lambda: condition() or process.poll() is not None, deadline_s, lambda: self.output)
        assert process.poll() is None, self.output

    def reach(self, process: subprocess.Popen[str], num_steps: int) -> None:
        self.wait(process, lambda: len(self.steps) >= num_steps)

    def kill_after(self, num_steps: int) -> None:
        """Starts it, and kills its driver after so many steps."""
        process = self.start()
        self.reach(process, num_steps)
        process.kill()
        process.wait()

    def kill_worker(self, role: str) -> None:
        """SIGKILL to one of the run's processes of this class."""
        running = marked(self.marks[-1])
        os.kill(min(pid for pid, command in running.items() if command.startswith(f"ray::{role}")), signal.SIGKILL)

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    @property
    def steps(self) -> list[int]:
        """As they stand in `metrics.jsonl`, in order."""
        return steps_of(self.run_folder)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the processes that a failed test left."""
        for mark in self.marks:
            for process_id in marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)


def steps_of(run_folder: Path) -> list[int]:
    return [r.step for r in read_records(run_folder / "metrics.jsonl") if isinstance(r, StepRecord)]


def marked(mark: str) -> dict[int, str]:
    """Process id -> command line of every process that was started with this mark."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or is another user's
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def none_left(mark: str) -> None:
    wait_until(lambda: not marked(mark), GONE_DEADLINE_S, lambda: marked(mark))


def trained_places(run_folder: Path) -> list[list[int]]:
    """Of the prompts of each step in the first epoch, as the trajectory log has them."""
    log = TrajectoryLog(run_folder / "trajectories", timeout_s=1.0)
    return [sorted(_place(group.group.group_id) for group in log.read(step)) for step in log.steps()]


def _place(group_id: str) -> int:
    epoch, place, _ = group_id.split("/", maxsplit=2)
    assert epoch == "0"
    return int(place)


def in_order(num_steps: int) -> list[list[int]]:
    """Places of the prompts of each step when none is lost or repeated."""
    return [list(range(n, n + PROMPTS_PER_STEP)) for n in range(0, num_steps * PROMPTS_PER_STEP, PROMPTS_PER_STEP)]
