"""Requests missing resources from the cluster's autoscaler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray
from ray.autoscaler.sdk import request_resources

GROUP_LABEL = "ray.io/node-group"  # label of nodes that an autoscaler (cluster launcher, KubeRay) started


def has_autoscaler() -> bool:
    """Whether a live node of the connected cluster belongs to a group of an autoscaler."""
    return any(node["Alive"] and GROUP_LABEL in node["Labels"] for node in ray.nodes())


class Autoscaler:
    """The standing request of one run for a cluster of some size.

    Ray keeps a request until it is replaced, and compares it with all resources of the cluster, not with the free ones.
    So a request contains everything that the run holds plus the missing resources.
    """

    def __init__(self) -> None:
        self._has_asked = False

    def ask(self, bundles: Sequence[Mapping[str, float]]) -> str:
        """Requests a cluster that holds all `bundles` at a time. Returns the result as a sentence for the user."""
        if not has_autoscaler():
            return "The cluster has no autoscaler that could add a node"
        request_resources(bundles=[dict(bundle) for bundle in bundles])
        self._has_asked = True
        return "The autoscaler has been asked for a node: ask again when it has joined (`ray status`)"

    def withdraw(self) -> None:
        """Withdraws the request."""
        if self._has_asked:
            request_resources(bundles=[])
            self._has_asked = False
