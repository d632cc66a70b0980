"""Checks that paths read on several nodes are absolute and name the same files on every node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement_groups import node_name
from mobula.configs.schema import RunConfig

ANSWER_S = 60.0


def relative_paths(config: RunConfig) -> dict[str, str]:
    """Key -> value of the run's relative paths. A `policy.model` that is no folder here may be a hub name."""
    paths = {"folder": str(config.folder), "data.path": str(config.data.path)}
    model = Path(config.policy.model)
    if config.policy.tiny != "none" or model.exists():
        paths["policy.model"] = config.policy.model
    return {key: value for key, value in paths.items() if not Path(value).is_absolute()}


def refuse_relative(config: RunConfig) -> None:
    """Raises:
    PreflightError: a path depends on a process's working folder; the message has the words to add.
    """
    paths = relative_paths(config)
    if paths:
        overrides = " ".join(f"{key}=/SHARED/{value}" for key, value in paths.items())
        raise PreflightError(
            f"{', '.join(f'{key}={value}' for key, value in paths.items())}: relative to a working folder, which is "
            f"another one on each node. Give absolute paths on a file system that all nodes see, e.g. {overrides}"
        )


def check_on_all_nodes(config: RunConfig) -> None:
    """On a connected cluster of several nodes: every node sees the run's data, model and folder under the same paths.

    Raises:
        PreflightError: a path is relative, or a node does not see one; the message names node, key and path.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) < 2:
        return
    refuse_relative(config)
    folder = config.folder
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    probe = existing / f".mobula-{uuid4().hex}"
    paths = {"data.path": str(config.data.path), "folder": str(probe)}
    if Path(config.policy.model).is_absolute():
        paths["policy.model"] = config.policy.model
    try:
        probe.touch()
        missing = missing_on(nodes, paths)
    except OSError as error:
        raise PreflightError(
            f"folder={folder} cannot be written ({error}): name a folder that can be written"
        ) from error
    finally:
        probe.unlink(missing_ok=True)
    if missing:
        shown = "; ".join(
            f"{name} does not see {key}={existing if key == 'folder' else paths[key]}"
            for name, keys in missing.items()
            for key in keys
        )
        raise PreflightError(
            f"{shown}: mount the file system that holds it under the same path on every node, or name a path that "
            "all nodes see"
        )


def missing_on(nodes: Sequence[Mapping[str, object]], paths: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns node name -> keys of the paths missing there, for nodes with missing paths."""
    look = ray.remote(num_cpus=0, max_retries=0)(_unseen)
    calls = {
        node_name(node): look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False)
        ).remote(dict(paths))
        for node in nodes
    }
    try:
        answers = dict(zip(calls, ray.get(list(calls.values()), timeout=ANSWER_S), strict=True))
    except ray.exceptions.GetTimeoutError as error:
        raise PreflightError(
            f"waited {ANSWER_S:g} s for {', '.join(calls)} to look for the run's paths: see `ray status`"
        ) from error
    return {name: keys for name, keys in answers.items() if keys}


def _unseen(paths: dict[str, str]) -> list[str]:
    return [key for key, path in paths.items() if not os.path.exists(path)]
