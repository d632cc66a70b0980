"""Recovery: from the SIGKILL of a rollout actor until the run is as fast as before, in a real digits run.

Throughput is steps/s of the run's own records. On a machine without cores to spare the new engine takes time from the
one that is left while it loads; where each engine has a device of its own, only the lost engine's share is missing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements
from benchmarks.harness.role_time import idle_shares, snapshot
from benchmarks.harness.stage import private_ray, scratch_config
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.report.run_folder import METRICS_FILE, read_run_folder
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.rollout.in_flight import PROMPTS, TOKENS_KEPT, TOKENS_LOST
from mobula.configs.schema import RunConfig
from mobula.deploy.run.logs import LOG_FILE
from mobula.deploy.run.runtime import run_training

SETTINGS = (  # a random model hardly ever stops before its tokens are full, and hardly learns to at this rate
    "algorithm.max_staleness=1",
    "algorithm.prompts_per_step=8",
    "algorithm.samples_per_prompt=8",
    "sampler.max_tokens=8",
    "learner.learning_rate=1e-6",
    "warm_start.num_steps=0",
    "evaluation.num_prompts=8",
    "evaluation.interval_steps=0",
    "checkpoints.interval_steps=0",
    "num_steps=100000",
)
NUM_WARMUP_STEPS = 5
WINDOW = 5  # steps whose mean rate is compared
FULL = 0.9  # of the rate before the kill
POLL_S = 0.05
GIVE_UP_S = 240.0
UNIT = "steps/s"


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """One run: some steps, the kill, and as many steps once it is back."""
    with scratch_config(SETTINGS, overrides) as config, private_ray(config):
        watch = _Watch(config.run_folder, effort.num_steps)
        watcher = threading.Thread(target=watch.observe, name="watch the run")
        watcher.start()
        with suppress(KeyboardInterrupt):  # the watcher ends the run as a user would
            run_training(config, Console(stderr=True))
        watcher.join()
        steps = read_run_folder(config.run_folder).steps
    if watch.error is not None:
        raise watch.error
    return _findings(config, watch, steps)


@dataclass
class _Watch:
    """Looks at the run from outside, kills, and ends it. Times are seconds on one clock."""

    folder: Path
    num_steps: int  # before the kill, and after the recovery
    done_at: list[float] = field(default_factory=list)  # of each step
    num_steps_before: int = 0
    killed_at: float = 0.0
    noticed_at: float = 0.0
    serving_at: float = 0.0
    log_chars: int = 0  # that the run's log had at the kill
    idle: dict[str, dict[str, float]] = field(default_factory=dict)  # phase -> role -> share
    error: Exception | None = None

    def observe(self) -> None:
        try:
            self._observe()
        except Exception as error:  # it is raised where the result is awaited
            self.error = error
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    def _observe(self) -> None:
        self._wait(lambda: len(self.done_at) >= NUM_WARMUP_STEPS, "the first steps")
        with self._idle("before"):
            self._steps_more(self.num_steps)
        with self._idle("recovering"):
            self._kill()
            self._wait(lambda: self._says(" is lost ("), "the kill to be noticed")
            self.noticed_at = time.monotonic()
            self._wait(lambda: self._says(" joins with version "), "the new engine to serve")
            self.serving_at = time.monotonic()
        with self._idle("after"):
            self._steps_more(self.num_steps)

    def _kill(self) -> None:
        victim = next(process for process in snapshot() if process.role == "rollout")
        self.num_steps_before = len(self.done_at)
        self.log_chars = len(self._log())
        self.killed_at = time.monotonic()
        os.kill(victim.process_id, signal.SIGKILL)

    @contextmanager
    def _idle(self, phase: str) -> Iterator[None]:
        """Measure how idle all workers are while the body runs."""
        started, before = time.monotonic(), snapshot()
        yield
        self.idle[phase] = idle_shares(before, snapshot(), time.monotonic() - started)

    def _steps_more(self, num: int) -> None:
        target = len(self.done_at) + num
        self._wait(lambda: len(self.done_at) >= target, f"{num} more steps")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {GIVE_UP_S:g} s for {what}")
            time.sleep(POLL_S)
            self._count_steps()

    def _count_steps(self) -> None:
        file = self.folder / METRICS_FILE
        num = file.read_text(encoding="utf-8").count('"kind": "step"') if file.exists() else 0
        self.done_at += [time.monotonic()] * (num - len(self.done_at))

    def _says(self, text: str) -> bool:
        """Since the kill."""
        return text in self._log()[self.log_chars :]

    def _log(self) -> str:
        return (self.folder / LOG_FILE).read_text(encoding="utf-8")


def windows(done_at: Sequence[float], after: float) -> list[tuple[float, float]]:
    """Of every `WINDOW` steps in a row that were done after `after`: when they began, and their rate."""
    later = [at for at in done_at if at >= after]
    pairs = zip(later, later[WINDOW:], strict=False)
    return [(first, WINDOW / (last - first)) for first, last in pairs if last > first]


def _findings(config: RunConfig, watch: _Watch, steps: Sequence[StepRecord]) -> Findings:
    before = [rate for began, rate in windows(watch.done_at[: watch.num_steps_before], 0.0)]
    normal = Measurements(f"steps/s before the kill, {WINDOW} steps a value", UNIT, tuple(before))
    meanwhile = [rate for began, rate in windows(watch.done_at, watch.killed_at) if began < watch.serving_at]
    later = windows(watch.done_at, watch.serving_at)
    full = [began for began, rate in later if rate >= FULL * normal.median]
    after = Measurements("the same, once the new engine served", UNIT, tuple(rate for _, rate in later))
    seconds = {
        "noticed": ("from the kill until the rollout pool had noticed", watch.noticed_at),
        "serving": ("until another engine served at the learner's version", watch.serving_at),
    }
    if full:
        seconds["full"] = (f"until {WINDOW} steps in a row began that had {FULL:g} of the rate before", full[0])
    series = {name: Measurements(what, "s", (at - watch.killed_at,)) for name, (what, at) in seconds.items()}
    series |= {"before": normal, "after": after}
    if meanwhile:
        series["meanwhile"] = Measurements(
            "with the engine that was left, while another loaded", UNIT, tuple(meanwhile)
        )
    claims = [Claim("rate after / before", after.median / normal.median, FULL)]
    if meanwhile:
        claims.append(Claim("rate meanwhile / before", series["meanwhile"].median / normal.median))
    settings = {
        "rollout_actors": config.resources.rollout.num_workers,
        "learner_ranks": config.resources.learner.num_workers,
        "max_tokens": config.sampler.max_tokens,
        "idle_share": watch.idle,
        **_lost(watch, steps),
    }
    return Findings(settings, series, tuple(claims))


def _lost(watch: _Watch, steps: Sequence[StepRecord]) -> dict[str, int]:
    """Outcome of the tokens in progress at the lost engine, as the in-flight requests count them."""
    first, last = (
        step.counters.get(CounterName.RESUMED, {}) for step in (steps[watch.num_steps_before - 1], steps[-1])
    )
    return {f"resumed_{what}": last.get(what, 0) - first.get(what, 0) for what in (PROMPTS, TOKENS_KEPT, TOKENS_LOST)}
