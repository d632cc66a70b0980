"""The raw parts of whole steps: engines and a trainer without anything of ours, each idle until it is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from benchmarks.apart import Peer
from benchmarks.raw_trainer import Rows, StepJob, raw_trainer, rows_of
from benchmarks.raw_vllm import Generated, GenerateJob, RawPrompt, raw_engine, settings_of
from benchmarks.stage import Stage
from cluster.media import MediaReader
from cluster.placement import PlacedWorker
from cluster.trajectory import Prompt

CALLS = 2  # generate calls, each of a whole step's prompts, in one measurement
TRAIN_STEPS = 2  # optimizer steps in one measurement
THREADS = (1, 2)  # of the trainer
GENERATE, TRAIN = "generate", "train"
ONE_CORE_ENGINE, ONE_CORE_TRAINER = f"{GENERATE}_one_core", f"{TRAIN}_1_threads"
WHAT = {
    f"{GENERATE}_one_engine": "LLM.generate, one engine with all cores; pictures processed beforehand",
    f"{GENERATE}_engine_a_core": "the same, with an engine on every core and the prompts shared out",
    ONE_CORE_ENGINE: "the same, with a single engine on one core",
    ONE_CORE_TRAINER: "forward, backward, clip and AdamW of all sequences in plain transformers, 1 thread",
    f"{TRAIN}_2_threads": "the same with 2 threads",
}

Engine = Peer[GenerateJob, Generated]


@dataclass
class RawStep:
    """`measure()` gives samples/s of each part, as `WHAT` names it, alone on the machine, with new prompts."""

    engines: Mapping[str, Sequence[Engine]]  # way to lay engines over the machine -> engines
    trainer: Peer[StepJob, float]
    jobs: Iterator[GenerateJob]
    rows: Rows

    def measure(self) -> dict[str, float]:
        found = {way: self._generating(engines) for way, engines in self.engines.items()}
        num_samples = len(self.rows.is_response)
        for num_threads in THREADS:
            seconds = self.trainer.ask(StepJob(self.rows, num_threads, TRAIN_STEPS))
            found[f"{TRAIN}_{num_threads}_threads"] = num_samples / seconds
        return found

    def _generating(self, engines: Sequence[Engine]) -> float:
        jobs = [next(self.jobs) for _ in range(CALLS)]
        num_samples = sum(settings.num_samples for job in jobs for settings in job.settings)
        return num_samples / sum(max(answer.seconds for answer in _shared_out(job, engines)) for job in jobs)


@contextmanager
def raw_step(stage: Stage, num_prompts: int, num_measurements: int) -> Iterator[RawStep]:
    """The parts of steps of `num_prompts`, measured at most `num_measurements` times, with the roles' own settings."""
    with ExitStack() as stack:
        ways = {
            way: [stack.enter_context(raw_engine(stage.prepared, worker)) for worker in workers]
            for way, workers in _ways(stage).items()
        }
        if len(ways) > 1:
            ways[ONE_CORE_ENGINE] = ways[f"{GENERATE}_engine_a_core"][:1]
        num_jobs = num_measurements * len(ways) * CALLS + 1
        rounds = stage.prompts(num_jobs, num_prompts)
        jobs = iter([_job(stage, prompts) for prompts in rounds])
        responses = [r for answer in _shared_out(next(jobs), [*ways.values()][0]) for r in answer.responses]
        rows = rows_of(rounds[0], responses, MediaReader(timeout_s=60, max_items=num_prompts))
        yield RawStep(ways, stack.enter_context(raw_trainer(stage.prepared.config)), jobs, rows)


def _ways(stage: Stage) -> dict[str, list[PlacedWorker]]:
    """One engine with all cores, and one a rollout actor. GPUs: one engine."""
    workers = stage.spawner.workers("rollout")
    cores = tuple(core for worker in workers for core in worker.cores)
    one = replace(workers[0], num_threads=sum(worker.num_threads for worker in workers), cores=cores)
    ways = {f"{GENERATE}_one_engine": [one]}
    if stage.prepared.config.resources.device == "cpu" and len(workers) > 1:
        ways[f"{GENERATE}_engine_a_core"] = list(workers)
    return ways


def _job(stage: Stage, prompts: Sequence[Prompt]) -> GenerateJob:
    settings = settings_of(stage.prepared.config, prompts)
    return GenerateJob([RawPrompt.of(prompt) for prompt in prompts], settings, is_processed=True)


def _shared_out(job: GenerateJob, engines: Sequence[Engine]) -> list[Generated]:
    """What the engines say, side by side, each to its share of the prompts."""
    share = -(-len(job.prompts) // len(engines))
    for index, engine in enumerate(engines):
        part = slice(index * share, (index + 1) * share)
        engine.send(replace(job, prompts=job.prompts[part], settings=job.settings[part]))
    return [engine.receive() for engine in engines]
