"""What a run will do, on one screen before its first step, and what its results depend on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import yaml

from mobula.actors.datasets.open_split import TRAIN
from mobula.actors.datasets.readers.arrow import fingerprint_of
from mobula.actors.datasets.rows import count_by_reason
from mobula.actors.environments.hosts.pool import num_concurrent
from mobula.cluster.audit.chain import AuditKind, read_chain
from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE
from mobula.cluster.replay.run_identity import run_identity
from mobula.cluster.runtime.placement import PlacementPlan
from mobula.cluster.weight_sync.manifest import Manifest, checkpoint_files
from mobula.configs.load import dump_config
from mobula.configs.schema import AlgorithmConfig, PolicyConfig, RunConfig
from mobula.configs.schema.data import AUTO_SUFFIX, DataKind
from mobula.deploy.host.machine import CPU_FILE
from mobula.deploy.host.processes import ROOT, checkout_commit
from mobula.deploy.wiring.preparation import AnyPrepared, Prepared
from mobula.learner.policies.adapters import adapter_manifest
from mobula.learner.policies.families import frozen_prefixes

_logger = logging.getLogger(__name__)

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
    algorithm, learner, sampler, offline = config.algorithm, config.learner, config.sampler, config.offline
    settings = json.loads((prepared.model_folder / "config.json").read_text(encoding="utf-8"))
    kind = settings["_class_name" if prepared.config.sampler.is_flow else "model_type"]
    parameters = Parameters.of(prepared.checkpoint, config.policy)
    done = f", of which {version} are done" if version else ""
    yield "run", f"{config.run_folder}, {config.num_steps} steps{done}, seed {config.seed}"
    yield "model", f"{config.policy.model} ({kind}, {_number(parameters.total)} parameters)"
    yield "trained", _trained(config, parameters)
    yield "data", _data(prepared)
    rate = f"{learner.learning_rate:g}, {learner.schedule}, {learner.warmup_steps} warm-up steps"
    longest = f"longest here {max(split.longest_prompt_tokens for split in prepared.splits.values()):,}"
    if offline.is_on:
        objectives = {
            "sft": "cross-entropy of the assistant's tokens",
            "reward_model": offline.reward_model.loss,
            "dpo": f"{offline.dpo.loss}, beta {offline.dpo.beta:g}, label smoothing {offline.dpo.label_smoothing:g}",
            "kto": f"beta {offline.kto.beta:g}, weights {offline.kto.desirable_weight:g} and "
            f"{offline.kto.undesirable_weight:g}",
        }
        yield "job", f"{offline.job} ({objectives[offline.job]}), {offline.batch_size} rows a step"
        yield "learning rate", rate
        yield "lengths", f"rows up to {offline.max_tokens:,} tokens ({longest})"
    else:
        yield (
            "algorithm",
            f"{algorithm.advantage}, {algorithm.prompts_per_step} prompts x {algorithm.samples_per_prompt} responses a "
            f"step, max_staleness {algorithm.max_staleness}, {_reference(algorithm)}",
        )
        yield "learning rate", f"{rate}, {algorithm.num_minibatches} optimizer steps a step"
        yield "warm start", _warm_start(config)
        yield (
            "lengths",
            f"prompts up to {config.data.max_prompt_tokens:,} tokens ({longest}), responses up to "
            f"{sampler.max_tokens:,}, temperature {sampler.temperature:g}",
        )
        yield from _prompt(prepared)
        if config.environment.is_on:
            cores = [len(worker.cores) for worker in plan.of_role("rollout") if worker.cores]
            num_cores = min(cores, default=len(os.sched_getaffinity(0)))
            at_once = f"{num_concurrent(config.environment, num_cores)} at a time on each rollout actor"
            bound = f"environment.max_concurrent={config.environment.max_concurrent}"
            yield "environment", f"{config.environment.name}, host={config.environment.host}, {at_once} ({bound})"
    rows, phase = ("rows", "training") if offline.is_on else ("prompts", "RL")
    every = _every(config.evaluation.interval_steps, f"before and after {phase}")
    yield "evaluation", f"{config.evaluation.num_prompts} {rows} of {config.evaluation.split}, {every}"
    yield "checkpoints", _checkpoints(config, parameters)
    if not offline.is_on:
        parts = config.rewards.components
        yield "rewards", ", ".join(f"{c.name} x {c.weight:g}{'' if c.trained else ' (judge)'}" for c in parts)
    yield "roles", _roles(config, plan)


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
    config = prepared.config
    if not isinstance(prepared, Prepared) or config.data.kind is DataKind.ENVIRONMENT:
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


PACKAGES = ("actors", "cluster", "configs", "deploy", "learner", "rewards")


def provenance(prepared: AnyPrepared) -> dict[str, Any]:
    config = prepared.config
    identity = prepared.identity
    text = dump_config(config)
    return {
        "run": config.name,
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "seed": config.seed,
        "bounds": bounds(config),
        "code": code(),
        "packages": packages(),
        "machine": machine(),
        "data": {key: identity[key] for key in sorted(identity.keys() - run_identity(config).keys())},
        "model": _model(prepared.model_folder),
    }


def bounds(config: RunConfig) -> dict[str, Any]:
    return {
        "max_staleness": 0 if config.offline.is_on else config.algorithm.max_staleness,
        "stragglers": config.algorithm.stragglers,
        "num_steps": config.num_steps,
        "keep": config.checkpoints.keep,
    }


def code() -> dict[str, str]:
    """Returns version, commit (empty outside a checkout) and the sha256 of all modules."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT)}\0{len(content)}\0".encode() + content)
    return {"version": metadata.version("mobula"), "commit": checkout_commit(), "sha256": digest.hexdigest()}


def packages() -> dict[str, str]:
    """Returns name -> version of every installed distribution, from the names of their folders."""
    names = [path.stem for folder in sys.path if folder for path in Path(folder).glob("*.dist-info")]
    return {name.lower(): version for name, _, version in sorted(stem.partition("-") for stem in names)}


def machine() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
    }


def differences(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Returns dotted key -> (then, now) of every value that differs; None for a missing value."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(was.keys() | now.keys()):
        old, new = was.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[f"{prefix}{key}"] = (old, new)
    return found


def _model(folder: Path) -> str:
    try:
        return fingerprint_of(checkpoint_files(folder))
    except (PreflightError, OSError):  # a flow pipeline has its weights in folders of its parts
        return fingerprint_of(sorted(folder.rglob("*.safetensors")))


def cpu_name() -> str:
    lines = CPU_FILE.read_text(encoding="utf-8").splitlines() if CPU_FILE.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


OF_EACH_RUN = ("name", "folder", "resume", "reproduce")  # keys that differ between any two runs
COMPARED = ("code", "packages", "machine", "data", "model")
MAX_SHOWN = 20  # differences on the console; the run's first record has all


def reproduction(config: RunConfig, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Logs what differs from the run that `reproduce` names, and returns it for the first record; empty without it."""
    if not config.reproduce:
        return {}
    folder = Path(config.reproduce)
    found = _changed_keys(folder, config) | _changed_surroundings(folder, provenance)
    shown = [f"{key}={now} (was {was})" for key, (was, now) in found.items()]
    if found:
        more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
        _logger.warning("this run reproduces %s and differs in %s%s", folder, ", ".join(shown[:MAX_SHOWN]), more)
    else:
        _logger.info("this run reproduces %s, with equal words, code, packages, machine, data and model", folder)
    return {"reproduces": {"run": str(folder), "differences": {key: list(pair) for key, pair in found.items()}}}


def _changed_keys(folder: Path, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    was = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    now = config.model_dump(mode="json")
    # Sections that the run did not read are not in its file.
    found = {key: pair for key, pair in differences(was, now).items() if _is_in(was, key)}
    return {key: pair for key, pair in found.items() if key not in OF_EACH_RUN}


def _changed_surroundings(folder: Path, provenance: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    try:
        records = read_chain(folder).records
        was = next(record.body for record in records if record.kind == AuditKind.STARTED)
    except (PreflightError, StopIteration):
        return {"audit": (None, "the run has no audit.jsonl: code, packages, machine and data cannot be compared")}
    return differences({key: was[key] for key in COMPARED}, {key: provenance[key] for key in COMPARED})


def _is_in(values: Mapping[str, Any], key: str) -> bool:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True
