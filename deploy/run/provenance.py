"""Provenance of a run, and its reproduction."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from mobula.actors.datasets.readers.parquet import fingerprint_of
from mobula.cluster.audit.chain import AuditKind, read_chain
from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE
from mobula.cluster.replay.run_identity import run_identity
from mobula.cluster.weight_sync.manifest import checkpoint_files
from mobula.configs.load import dump_config
from mobula.configs.schema import RunConfig
from mobula.deploy.host.machine import CPU_FILE, commit_of
from mobula.deploy.wiring.preparation import AnyPrepared

ROOT = Path(__file__).parents[2]


PACKAGES = ("actors", "cluster", "configs", "deploy", "learner", "rewards")


def provenance(prepared: AnyPrepared) -> dict[str, Any]:
    """Returns what the results of a run depend on, as JSON."""
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
    """Returns the limits that the audit compares with."""
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
    return {"version": metadata.version("mobula"), "commit": commit_of(ROOT), "sha256": digest.hexdigest()}


def packages() -> dict[str, str]:
    """Returns name -> version of every installed distribution, from the names of their folders."""
    names = [path.stem for folder in sys.path if folder for path in Path(folder).glob("*.dist-info")]
    return {name.lower(): version for name, _, version in sorted(stem.partition("-") for stem in names)}


def machine() -> dict[str, Any]:
    """Returns the machine of the driver."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu(),
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
    """Returns a fingerprint of the weight files from which the run begins."""
    try:
        return fingerprint_of(checkpoint_files(folder))
    except (PreflightError, OSError):  # a flow pipeline has its weights in folders of its parts
        return fingerprint_of(sorted(folder.rglob("*.safetensors")))


def _cpu() -> str:
    lines = CPU_FILE.read_text(encoding="utf-8").splitlines() if CPU_FILE.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


_logger = logging.getLogger(__name__)


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
    """Returns dotted key -> (then, now) of the configuration."""
    was = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    now = config.model_dump(mode="json")
    # Sections that the run did not read are not in its file.
    found = {key: pair for key, pair in differences(was, now).items() if _is_in(was, key)}
    return {key: pair for key, pair in found.items() if key not in OF_EACH_RUN}


def _changed_surroundings(folder: Path, provenance: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns dotted key -> (then, now) of code, packages, machine, data and model."""
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
