"""Peak resident memory of each learner rank while it loads, trains, saves, exports and pushes, over its bound.

Four FSDP2 ranks share a text model of random weights and more than 1 GiB in float32, so that each keeps the gradients
of its shard alone. The bound is 1.15 times what `mobula plan` counts for training (shards of weights, gradients and
optimizer, gathered blocks, activations), plus the peak of the same rank with a tiny model in the same phase.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements
from benchmarks.harness.peak_memory import peak_bytes, restart_peak
from benchmarks.harness.stage import scratch_config, scratch_folder
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import (
    FinishReason,
    Prompt,
    Response,
    Reward,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.memory import TRAINING, WorkerMemory, policy_shape, worker_memory
from mobula.deploy.preloading.preloaded import allocator_environment
from mobula.learner.learner import Learner
from mobula.learner.policies.checkpoint import write_weights

NUM_RANKS, NUM_STEPS, EPOCH = 4, 3, 1
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 32
SETTINGS = (
    f"resources.learner.num_workers={NUM_RANKS}",
    "learner=fsdp2",
    "algorithm.prompts_per_step=2",  # with 4 answers each: two micro-batches of one row for every rank
    "algorithm.samples_per_prompt=4",
    f"data.max_prompt_tokens={PROMPT_TOKENS}",
    f"sampler.max_tokens={RESPONSE_TOKENS}",
    f"sampler.max_model_len={PROMPT_TOKENS + RESPONSE_TOKENS}",
    f"learner.tokens_per_microbatch={PROMPT_TOKENS + RESPONSE_TOKENS}",
)
LARGE = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
SMALLER = {**LARGE, "num_hidden_layers": 6}  # of a quick run
TINY = {**LARGE, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
PHASES = ("load", "train", "save", "export", "push")
MAX_STATE, MAX_PLANNED = 1.15, 1.15
MIB = 2**20

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phase:
    """What a rank does, `argument` being the address of the ranks or the rendezvous of the push."""

    name: str
    argument: Any = None


class Rank:
    """One learner rank in a process of its own."""

    def __init__(self, config: RunConfig, groups: Sequence[ScoredGroup], rank: int) -> None:
        self._config = config
        self._groups = groups
        self._learner = Learner(config, rank, NUM_RANKS, ())

    def __call__(self, phase: Phase) -> tuple[int, Any]:
        """The peak of a phase in bytes, and the result of the method that it is."""
        restart_peak()
        result = self._run(phase)
        return peak_bytes(), result

    def _run(self, phase: Phase) -> Any:
        learner, folder = self._learner, self._config.folder
        match phase.name:
            case "address":
                return learner.rendezvous_address()
            case "load":
                learner.connect(phase.argument)
            case "train":
                for step in range(NUM_STEPS):
                    learner.update(self._groups, step + 1)
            case "save":  # with a step while it is written
                learner.save(folder / "state")
                learner.update(self._groups, NUM_STEPS + 1)
                learner.finish_save()
            case "export":
                learner.export(folder / "export")
            case "open":
                return learner.open_transfer(EPOCH, num_receivers=1), learner.manifest()
            case "push":
                learner.join_transfer(phase.argument)
                learner.send_weights(self._config.weight_sync.bucket_bytes, EPOCH)
        return None


def _receive(rendezvous: Rendezvous, manifest: Manifest, bucket_bytes: int) -> None:
    """Receives a push in this process and keeps nothing of it."""
    group = TransferGroup(rendezvous, 1, torch.device("cpu"))
    for _ in group.receive(manifest, bucket_bytes, keeps=False):
        pass
    group.close()


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """All phases with the tiny model, for the constant of the process, then with the large one."""
    shape = SMALLER if effort == QUICK else LARGE
    constant, _ = _measured(TINY, overrides)
    peaks, memory = _measured(shape, overrides)
    _logger.info("MiB by phase: constant %s, all %s", _in_mib(constant), _in_mib(peaks))
    return _findings(shape, constant, peaks, memory)


def _measured(shape: Mapping[str, int], overrides: Sequence[str]) -> tuple[dict[str, int], WorkerMemory]:
    """The largest peak of a rank in each phase, in bytes, and the planner's figures."""
    with scratch_folder() as folder:
        settings = [*SETTINGS, f"policy.model={_write_model(shape, folder)}", f"data.path={folder}"]
        with scratch_config(settings, overrides, experiment="own") as config, ExitStack() as stack:
            model = policy_shape(config)
            assert model is not None, "the model is there"
            env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **allocator_environment(config)}
            groups = _groups(shape["vocab_size"])
            builds = [(Rank, config, groups, rank) for rank in range(NUM_RANKS)]
            ranks = [stack.enter_context(apart(*build, env=env)) for build in builds]
            peaks = _phases(ranks, config.weight_sync.bucket_bytes)
        return peaks, worker_memory(config, model, "learner")


def _phases(ranks: Sequence[Peer[Phase, tuple[int, Any]]], bucket_bytes: int) -> dict[str, int]:
    def by_all(name: str, argument: Any = None) -> int:
        for rank in ranks:
            rank.send(Phase(name, argument))
        return max(rank.receive()[0] for rank in ranks)

    _, address = ranks[0].ask(Phase("address"))
    peaks = {name: by_all(name, address) for name in PHASES[:-1]}
    _, (rendezvous, manifest) = ranks[0].ask(Phase("open"))
    receiver = Thread(target=_receive, args=(rendezvous, manifest, bucket_bytes))
    receiver.start()
    peaks["push"] = by_all("push", rendezvous)
    receiver.join()
    return peaks


def _findings(
    shape: Mapping[str, int], constant: Mapping[str, int], peaks: Mapping[str, int], memory: WorkerMemory
) -> Findings:
    state, planned = sum(memory.device[TRAINING].values()), memory.peak + sum(memory.host.values())
    series = {
        "state": Measurements("what the plan counts for training", "MiB", (state / MIB,)),
        "planned": Measurements("the plan's estimate of the process", "MiB", (planned / MIB,)),
    }
    claims = []
    for phase, peak in peaks.items():
        series[phase] = Measurements(f"peak of a rank, {phase}", "MiB", (peak / MIB,))
        series[f"{phase}, tiny"] = Measurements(
            f"peak of a rank with a tiny model, {phase}", "MiB", (constant[phase] / MIB,)
        )
        share = (peak - constant[phase]) / state
        claims.append(Claim(f"{phase}: peak without the process / state", share, MAX_STATE, at_least=False))
    largest = max(peaks.values())
    off = max(largest / planned, planned / largest)
    claims.append(Claim("largest peak and plan: the larger over the smaller", off, MAX_PLANNED, at_least=False))
    parts = {"state_mib": _in_mib(memory.device[TRAINING]), "host_mib": _in_mib(memory.host)}
    return Findings({"model": dict(shape), "ranks": NUM_RANKS, "steps": NUM_STEPS, **parts}, series, tuple(claims))


def _in_mib(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size // MIB for name, size in sizes.items()}


def _write_model(shape: Mapping[str, int], folder: Path) -> Path:
    """A checkpoint of random weights, written tensor by tensor."""
    config = Qwen2Config(**shape, tie_word_embeddings=True, dtype="float32")
    with torch.device("meta"):
        tensors = Qwen2ForCausalLM(config).state_dict()
    tensors.pop("lm_head.weight")  # tied
    torch.manual_seed(0)
    drawn = ((name, torch.randn(t.shape) * 0.02 if t.ndim > 1 else torch.ones(t.shape)) for name, t in tensors.items())
    config.save_pretrained(folder)
    write_weights(folder, "model", tensors, drawn, max_file_size="50GB")
    return folder


def _groups(vocabulary: int) -> list[ScoredGroup]:
    """Two groups of four answers, all of the longest length."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(2):
        asked = rng.integers(0, vocabulary, size=PROMPT_TOKENS).astype(np.int32)
        prompt = Prompt(str(number), str(number), "", asked, asked)
        answers = rng.integers(0, vocabulary, size=(4, RESPONSE_TOKENS)).astype(np.int32)
        trajectories = tuple(_trajectory(f"{number}#{n}", answer) for n, answer in enumerate(answers))
        group = TrajectoryGroup(prompt, trajectories)
        groups.append(ScoredGroup(group.summary(), group, tuple(Reward(float(n % 2)) for n in range(4))))
    return groups


def _trajectory(name: str, answer: np.ndarray) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        actions=TokenActions(answer),
        behavior_logprobs=np.full(len(answer), -10.0, dtype=np.float32),
        action_mask=np.ones(len(answer), dtype=bool),
        weight_spans=(WeightSpan(0, 0, len(answer)),),
        finish_reason=FinishReason.STOP,
        response=Response("", len(answer), False),
    )
