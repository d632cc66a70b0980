"""The raw parts of whole steps: engines and a trainer without anything of ours, each idle until it is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.harness.apart import Peer
from benchmarks.harness.stage import Stage
from benchmarks.raw.raw_trainer import StepJob, microbatches_of, raw_trainer
from benchmarks.raw.raw_vllm import Generated, GenerateJob, RawPrompt, raw_engine, settings_of
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.runtime.placement import PlacedWorker
from mobula.configs.schema import RunConfig

CALLS = 2  # generate calls, each of a whole step's prompts, in one measurement
TRAIN_STEPS = 2  # optimizer steps in one measurement
GENERATE, TRAIN = "generate", "train"
ONE_CORE_ENGINE, ONE_CORE_TRAINER = f"{GENERATE}_one_core", f"{TRAIN}_1_threads"
WHAT = {
    f"{GENERATE}_one_engine": "LLM.generate, one engine with all cores; images processed beforehand",
    f"{GENERATE}_engine_a_core": "the same, with an engine on every core and the prompts shared out",
    ONE_CORE_ENGINE: "the same, with a single engine on one core",
    ONE_CORE_TRAINER: "forward, backward, clip and AdamW of a step's sequences in plain transformers, 1 thread",
    f"{TRAIN}_2_threads": "the same with 2 threads",
}

Engine = Peer[GenerateJob, Generated]


@dataclass
class RawStep:
    """`measure()` gives response tokens/s of each part, as `WHAT` names it, alone on the machine, with new prompts.

    The trainer takes what the engines have just sampled, in micro-batches of the size of the learner's.
    """

    config: RunConfig
    engines: Mapping[str, Sequence[Engine]]  # way to lay engines over the machine -> engines
    trainer: Peer[StepJob, float]
    threads: Sequence[int]  # of the trainer, in turn
    rounds: Iterator[Sequence[Prompt]]
    reader: MediaReader
    padded_shares: list[float] = field(default_factory=list)  # of the positions that the trainer computed

    def measure(self) -> dict[str, float]:
        calls = {way: [self._generate(next(self.rounds), e) for _ in range(CALLS)] for way, e in self.engines.items()}
        found = {way: sum(c.num_tokens for c in done) / sum(c.seconds for c in done) for way, done in calls.items()}
        *_, [*_, last] = calls.values()
        max_tokens = self.config.learner.tokens_per_microbatch
        batches = microbatches_of(last.prompts, last.responses, self.reader, max_tokens)
        for num_threads in self.threads:
            job = StepJob(batches, num_threads, TRAIN_STEPS)
            found[f"{TRAIN}_{num_threads}_threads"] = job.num_targets / self.trainer.ask(job)
        self.padded_shares.append(job.padded_share)
        return found

    def _generate(self, prompts: Sequence[Prompt], engines: Sequence[Engine]) -> _Call:
        raw, settings = [RawPrompt.of(prompt) for prompt in prompts], settings_of(self.config, prompts)
        answers = _shared_out(GenerateJob(raw, settings, is_processed=True), engines)
        responses = [siblings for answer in answers for siblings in answer.responses]
        return _Call(prompts, responses, max(answer.seconds for answer in answers))


@dataclass(frozen=True)
class _Call:
    """One generate call of all engines: what they sampled, and the seconds of the slowest."""

    prompts: Sequence[Prompt]
    responses: Sequence[Sequence[np.ndarray]]  # int32 [T], by prompt and sibling
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for siblings in self.responses for tokens in siblings)


@contextmanager
def raw_step(stage: Stage, num_prompts: int, num_measurements: int, threads: Sequence[int]) -> Iterator[RawStep]:
    """The parts of steps of `num_prompts`, measured at most `num_measurements` times, with the roles' own settings."""
    with ExitStack() as stack:
        ways = {
            way: [stack.enter_context(raw_engine(stage.prepared, worker)) for worker in workers]
            for way, workers in _ways(stage).items()
        }
        if len(ways) > 1:
            ways[ONE_CORE_ENGINE] = ways[f"{GENERATE}_engine_a_core"][:1]
        config = stage.prepared.config
        rounds = iter(stage.prompts(num_measurements * len(ways) * CALLS, num_prompts))
        reader = MediaReader(timeout_s=60, max_items=num_prompts * config.sampler.max_images_per_prompt)
        yield RawStep(config, ways, stack.enter_context(raw_trainer(config)), threads, rounds, reader)


def _ways(stage: Stage) -> dict[str, list[PlacedWorker]]:
    """One engine with all cores of the rollout actors, and one a rollout actor. GPUs: one engine."""
    workers = stage.spawner.workers("rollout")
    cores = tuple(core for worker in workers for core in worker.cores)
    one = replace(workers[0], num_threads=sum(worker.num_threads for worker in workers), cores=cores)
    if len(cores) == 1:
        return {ONE_CORE_ENGINE: [one]}
    ways = {f"{GENERATE}_one_engine": [one]}
    if stage.prepared.config.resources.device == "cpu" and len(workers) > 1:
        ways[f"{GENERATE}_engine_a_core"] = list(workers)
    return ways


def _shared_out(job: GenerateJob, engines: Sequence[Engine]) -> list[Generated]:
    """The engines' answers, side by side, each to its share of the prompts."""
    share = -(-len(job.prompts) // len(engines))
    for index, engine in enumerate(engines):
        part = slice(index * share, (index + 1) * share)
        engine.send(replace(job, prompts=job.prompts[part], settings=job.settings[part]))
    return [engine.receive() for engine in engines]
