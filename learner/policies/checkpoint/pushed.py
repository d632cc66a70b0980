"""Selects the tensors of a weight push."""

from __future__ import annotations

from dataclasses import replace

from mobula.cluster.weight_sync.manifest import Manifest, Payload
from mobula.configs.schema import RunConfig
from mobula.learner.policies.families import frozen_prefixes

EXPERTS = ".experts."


def pushed_manifest(checkpoint: Manifest, config: RunConfig) -> Manifest:
    """Returns the manifest of a push of weights: `checkpoint` without frozen tensors (`policy.freeze`), which the
    engines already have.

    vLLM loads q, k and v, gate and up, or all experts of a block as one layer: a frozen tensor is sent if another
    tensor of the same parent module is trained. At `resources.sleep_level` 2 engines discard their weights, so all
    tensors are sent.
    """
    payload: Payload = "delta" if config.weight_sync.payload == "delta" else "weights"
    frozen = frozen_prefixes(config.policy)
    if not frozen or (config.resources.colocated and config.resources.sleep_level == 2):
        return replace(checkpoint, payload=payload)
    trained = {_parent(spec.name) for spec in checkpoint.tensors if not spec.name.startswith(frozen)}
    return Manifest(tuple(spec for spec in checkpoint.tensors if _parent(spec.name) in trained), payload)


def _parent(name: str) -> str:
    """Returns the module whose children vLLM may load as one layer."""
    block, experts, _ = name.partition(EXPERTS)
    return block + experts if experts else name.rsplit(".", 2)[0]
