"""One screen that shows what a run will do, before its first step; read from the checkpoint's headers and the data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from mobula.actors.datasets.rows import count_by_reason
from mobula.cluster.runtime.placement import PlacementPlan
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.configs.schema import AlgorithmConfig, PolicyConfig, RunConfig
from mobula.configs.schema.data import AUTO_SUFFIX
from mobula.deploy.wiring.preparation import TRAIN, AnyPrepared, Prepared
from mobula.learner.policies.adapters import adapter_manifest
from mobula.learner.policies.families import frozen_prefixes

LABEL_WIDTH = 15
MAX_PROMPT = 400  # characters of the prompt that is shown
FLOAT32 = 4
MOMENTS = {"adamw": 8, "adamw_8bit": 2, "muon": 4}  # bytes that an optimizer keeps of a value; Muon's of matrices


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of a policy: total, and trained (adapters are not part of the total)."""

    total: int
    trained: int
    frozen: int

    @classmethod
    def of(cls, checkpoint: Manifest, policy: PolicyConfig) -> Parameters:
        total = _count(checkpoint)
        if policy.lora.is_on:
            return cls(total, _count(adapter_manifest(checkpoint, policy)), total)
        starts = frozen_prefixes(policy)
        frozen = sum(prod(spec.shape) for spec in checkpoint.tensors if spec.name.startswith(starts))
        return cls(total, total - frozen, frozen)


def overview(prepared: AnyPrepared, plan: PlacementPlan, version: int) -> str:
    """Overview of a run before its first step, one line for each topic; `version` is its first weight version."""
    return "\n".join(f"{label:<{LABEL_WIDTH}}{text}" for label, text in _topics(prepared, plan, version))


def _topics(prepared: AnyPrepared, plan: PlacementPlan, version: int) -> Iterator[tuple[str, str]]:
    config = prepared.config
    algorithm, learner, sampler = config.algorithm, config.learner, config.sampler
    settings = json.loads((prepared.model_folder / "config.json").read_text(encoding="utf-8"))
    kind = settings["_class_name" if prepared.config.sampler.is_flow else "model_type"]
    parameters = Parameters.of(prepared.checkpoint, config.policy)
    yield "run", f"{config.run_folder}, {_steps(config, version)}, seed {config.seed}"
    yield "model", f"{config.policy.model} ({kind}, {_number(parameters.total)} parameters)"
    yield "trained", _trained(config, parameters)
    yield "data", _data(prepared)
    if config.offline.is_on:
        yield from _offline_topics(prepared, plan, parameters)
        return
    yield (
        "algorithm",
        f"{algorithm.advantage}, {algorithm.prompts_per_step} prompts x {algorithm.samples_per_prompt} responses a "
        f"step, max_staleness {algorithm.max_staleness}, {_reference(algorithm)}",
    )
    yield (
        "learning rate",
        f"{learner.learning_rate:g}, {learner.schedule}, {learner.warmup_steps} warm-up steps, "
        f"{algorithm.num_minibatches} optimizer steps a step",
    )
    yield "warm start", _warm_start(config)
    yield (
        "lengths",
        f"prompts up to {config.data.max_prompt_tokens:,} tokens (longest here "
        f"{max(split.longest_prompt_tokens for split in prepared.splits.values()):,}), responses up to "
        f"{sampler.max_tokens:,}, temperature {sampler.temperature:g}",
    )
    yield from _prompt(prepared)
    every = _every(config.evaluation.interval_steps, "before and after RL")
    yield "evaluation", f"{config.evaluation.num_prompts} prompts of {config.evaluation.split}, {every}"
    yield "checkpoints", _checkpoints(config, parameters)
    parts = config.rewards.components
    yield "rewards", ", ".join(f"{c.name} x {c.weight:g}{'' if c.trained else ' (judge)'}" for c in parts)
    yield "roles", _roles(config, plan)


def _offline_topics(prepared: AnyPrepared, plan: PlacementPlan, parameters: Parameters) -> Iterator[tuple[str, str]]:
    config = prepared.config
    offline, learner = config.offline, config.learner
    objectives = {
        "sft": "cross-entropy of the assistant's tokens",
        "reward_model": offline.reward_model.loss,
        "dpo": f"{offline.dpo.loss}, beta {offline.dpo.beta:g}, label smoothing {offline.dpo.label_smoothing:g}",
    }
    yield "job", f"{offline.job} ({objectives[offline.job]}), {offline.batch_size} rows a step"
    yield (
        "learning rate",
        f"{learner.learning_rate:g}, {learner.schedule}, {learner.warmup_steps} warm-up steps",
    )
    longest = max(split.longest_prompt_tokens for split in prepared.splits.values())
    yield "lengths", f"rows up to {offline.max_tokens:,} tokens (longest here {longest:,})"
    every = _every(config.evaluation.interval_steps, "before and after training")
    yield "evaluation", f"{config.evaluation.num_prompts} rows of {config.evaluation.split}, {every}"
    yield "checkpoints", _checkpoints(config, parameters)
    yield "roles", _roles(config, plan)


def _steps(config: RunConfig, version: int) -> str:
    return f"{config.num_steps} steps" + (f", of which {version} are done" if version else "")


def _reference(algorithm: AlgorithmConfig) -> str:
    if algorithm.distillation.is_on:
        teacher = algorithm.distillation
        others = "".join(f", {label}: {name}" for label, name in teacher.teachers.items())
        weights = f"x {teacher.coef:g} ({teacher.place}), rewards x {teacher.reward_weight:g}"
        return f"teacher {teacher.teacher}{others} {weights}"
    kl = algorithm.kl
    return f"KL {kl.coef:g} ({kl.estimator}) to the reference" if kl.coef > 0 else "no KL"


def _trained(config: RunConfig, parameters: Parameters) -> str:
    policy, shares = config.policy, f"{_number(parameters.trained)} parameters"
    frozen = f"frozen: {', '.join(policy.freeze)} ({_number(parameters.frozen)})" if policy.freeze else "nothing frozen"
    if policy.lora.is_on:
        frozen = f"frozen: all weights of the model ({_number(parameters.frozen)})"
        shares += f" in adapters of rank {policy.lora.rank} on {', '.join(policy.lora.target_modules)}"
        if policy.freeze:
            shares += f", none below {', '.join(policy.freeze)}"
    return f"{shares}; {frozen}"


def _data(prepared: AnyPrepared) -> str:
    rows = ", ".join(f"{name} {len(split.rows):,}" for name, split in prepared.splits.items())
    reasons = count_by_reason(prepared.skipped)
    named = ", ".join(f"{reason} {number}" for reason, number in sorted(reasons.items()))
    return f"{prepared.config.data.path}: {rows} rows; {f'skipped: {named}' if reasons else 'none skipped'}"


def _prompt(prepared: AnyPrepared) -> Iterator[tuple[str, str]]:
    """Yields the prompt suffix and the end of one prompt; nothing for environments, which build their prompts."""
    config = prepared.config
    if not isinstance(prepared, Prepared) or config.environment.is_on:
        return
    suffix = config.question_suffix
    reads = "reads a box" if config.rewards.reads_box else "reads no box"
    reason = f", the reward {reads}" if config.data.prompt_suffix == AUTO_SUFFIX else ""
    yield "suffix", f"{suffix!r} is put behind each question (data.prompt_suffix={config.data.prompt_suffix}{reason})"
    text = prepared.processor.prompt_text(prepared.splits[TRAIN].rows[0])
    yield "a prompt", repr(text if len(text) <= MAX_PROMPT else f"...{text[-MAX_PROMPT:]}")


def _warm_start(config: RunConfig) -> str:
    warm_start = config.warm_start
    if warm_start.num_steps == 0:
        return "none"
    rows = f"{warm_start.num_rows} rows" if warm_start.num_rows else "all rows"
    return (
        f"up to {warm_start.num_steps} supervised steps on {rows} at {warm_start.learning_rate:g}, until accuracy "
        f"{warm_start.target_accuracy:g} on validation"
    )


def _every(interval: int, otherwise: str) -> str:
    return f"every {interval} steps and {otherwise}" if interval else otherwise


def _checkpoints(config: RunConfig, parameters: Parameters) -> str:
    every, keep = _every(config.checkpoints.interval_steps, "at the end"), config.checkpoints.keep
    return f"{every}, {keep} kept, each about {checkpoint_bytes(config, parameters) / 1e9:.2g} GB on disk"


def checkpoint_bytes(config: RunConfig, parameters: Parameters) -> int:
    """Returns the bytes of a checkpoint: trained float32 parameters, optimizer state, weight average and critic."""
    moments = MOMENTS[config.learner.optimizer]
    average = FLOAT32 if config.learner.ema_decay > 0 else 0
    critic = parameters.total * (FLOAT32 + MOMENTS[config.algorithm.critic.optimizer])
    has_critic = config.algorithm.critic.place != "none"
    return parameters.trained * (FLOAT32 + moments + average) + (critic if has_critic else 0)


def _roles(config: RunConfig, plan: PlacementPlan) -> str:
    resources = config.resources
    counts = dict.fromkeys(worker.role for worker in plan.workers)
    roles = ", ".join(f"{role} {len(plan.of_role(role))}" for role in counts)
    engine = "no engine" if config.offline.is_on else config.sampler.kind
    compute = f"{resources.device}, {resources.dtype}"
    return f"{roles}; resources={resources.preset} ({compute}), {engine}, {config.learner.backend}"


def _count(manifest: Manifest) -> int:
    return sum(prod(spec.shape) for spec in manifest.tensors)


def _number(count: int) -> str:
    """Formats a count with three digits and a unit: 3.75 B, 12.3 M, 640 k."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
