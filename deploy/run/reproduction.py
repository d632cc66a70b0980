"""`reproduce=RUN`: what differs between a run and the run that it reproduces."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mobula.cluster.audit.chain import AuditKind, read_chain
from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE
from mobula.configs.schema import RunConfig
from mobula.deploy.run.provenance import differences

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
