"""Asking the cluster's autoscaler, where there is one, for what a run could not be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray
from ray.autoscaler.sdk import request_resources

GROUP_LABEL = "ray.io/node-group"  # on nodes that an autoscaler (cluster launcher, KubeRay) started


def has_autoscaler() -> bool:
    """Whether some live node of the connected cluster belongs to a group that an autoscaler manages."""
    return any(node["Alive"] and GROUP_LABEL in node["Labels"] for node in ray.nodes())


class Autoscaler:
    """One run's standing request: the size of cluster that it wants to fit into.

    Ray keeps such a request until it is replaced, and compares it with what the cluster has, not with what is free. So
    a request names everything that the run holds and what is missing besides.
    """

    def __init__(self) -> None:
        self._has_asked = False

    def ask(self, bundles: Sequence[Mapping[str, float]]) -> str:
        """Ask for a cluster that holds `bundles` at once; what came of it, as a sentence for the user."""
        if not has_autoscaler():
            return "The cluster has no autoscaler that could add a node"
        request_resources(bundles=[dict(bundle) for bundle in bundles])
        self._has_asked = True
        return "The autoscaler has been asked for a node: ask again when it has joined (`ray status`)"

    def withdraw(self) -> None:
        """Want no more than what there is."""
        if self._has_asked:
            request_resources(bundles=[])
            self._has_asked = False
