"""Low-rank adapters as tensors: adapted weights, names in a push, and merging.

An adapter of a weight W [out, in] is A [rank, in] and B [out, rank]; the effective weight is W + scale * B @ A. Names
are based on the checkpoint: the adapter of `model.layers.0.self_attn.q_proj.weight` is sent as
`...q_proj.lora_A.weight` and `...q_proj.lora_B.weight`. Learner and engines determine adapted weights by the same rule,
each from its model. Source: arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.configs.schema import PolicyConfig
from mobula.learner.policies.checkpoint.stored import pushed_tensors
from mobula.learner.policies.families import LANGUAGE, PART_NAMES, frozen_prefixes
from mobula.learner.policies.shapes import ModelShape, layer_kind, shape_of

A, B = "lora_A.weight", "lora_B.weight"
WEIGHT = "weight"
DTYPE = "float32"  # as in training: rounded factors would round the product twice


@dataclass(frozen=True)
class AdapterBase:
    """The base weights that adapters are merged into."""

    folder: str  # the checkpoint of the base weights
    scale: float
    dtype: str  # of the merged weights


@dataclass(frozen=True)
class AdapterPush:
    """A receiver's description of pushes of adapters."""

    manifest: Manifest
    base: AdapterBase

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, policy: PolicyConfig, dtype: str) -> AdapterPush | None:
        """For the checkpoint in `folder` with weights `manifest`; None if the policy has no adapters."""
        if not policy.lora.is_on:
            return None
        return cls(adapter_manifest(manifest, policy), AdapterBase(str(folder), policy.lora.scale, dtype))

    def is_meant_by(self, manifest: Manifest) -> bool:
        """Whether a push sends adapters; else it sends weights, which any engine can load."""
        return manifest.payload == "adapters"


def adapted_modules(
    manifest: Manifest, policy: PolicyConfig, shape: ModelShape | None = None
) -> dict[str, tuple[int, int]]:
    """Module with an adapter -> shape of the weight, in the manifest's order.

    Args:
        shape: of the model; None reads it from `policy.model` if `policy.lora.target_modules` names a part.

    Raises:
        ValueError: `policy.lora.target_modules` matches nothing, or `policy.freeze` excludes all matches.
    """
    matrices = {
        spec.name.removesuffix(f".{WEIGHT}"): spec.shape
        for spec in manifest.tensors
        if len(spec.shape) == 2 and spec.name.endswith(f".{WEIGHT}")
    }
    kinds = {layer_kind(module) for module in matrices}
    named = [target for target in policy.lora.target_modules if target not in kinds]
    is_part = any(target in PART_NAMES for target in named)
    parts = _linear_layers(manifest, matrices, shape or shape_of(policy.model)) if is_part else {LANGUAGE: []}
    unknown = [target for target in named if target not in parts or not is_part]
    if unknown:
        raise ValueError(
            f"policy.lora.target_modules: no matrix of the model is called {', '.join(unknown)}; there are "
            f"{', '.join(sorted(kinds))}: name some of these, or a part of a token model: {', '.join(sorted(parts))}"
        )
    wanted = {module for target in named for module in parts[target]}
    wanted |= {module for module in matrices if layer_kind(module) in policy.lora.target_modules}
    frozen = frozen_prefixes(policy)
    adapted = {m: size for m, size in matrices.items() if m in wanted and not f"{m}.{WEIGHT}".startswith(frozen)}
    if not adapted:
        raise ValueError(
            f"policy.freeze={list(policy.freeze)} takes away every layer of policy.lora.target_modules="
            f"{list(policy.lora.target_modules)}, so nothing would be trained: change one of the two"
        )
    return adapted


def _linear_layers(manifest: Manifest, matrices: Iterable[str], shape: ModelShape) -> dict[str, list[str]]:
    """Part of the model -> linear layers; `language` is the decoder, also for models without a family file."""
    names, last = {spec.name for spec in manifest.tensors}, shape.decoder[-1]
    above = (name.removesuffix(last) for name in names if name.endswith(last))
    decoder = tuple(start for start in above if all(f"{start}{weight}" in names for weight in shape.decoder))
    linear = [module for module in matrices if layer_kind(module) in shape.linear_kinds]
    starts = {**shape.parts, LANGUAGE: decoder}
    layers = {part: [module for module in linear if f"{module}.".startswith(starts[part])] for part in starts}
    return {part: modules for part, modules in layers.items() if modules}


def adapter_manifest(manifest: Manifest, policy: PolicyConfig, shape: ModelShape | None = None) -> Manifest:
    """Returns the manifest of a push of adapters; `manifest` is for a push of all weights."""
    rank = policy.lora.rank
    return Manifest(
        tuple(
            spec
            for module, (rows, columns) in adapted_modules(manifest, policy, shape).items()
            for spec in (
                TensorSpec(f"{module}.{A}", (rank, columns), DTYPE),
                TensorSpec(f"{module}.{B}", (rows, rank), DTYPE),
            )
        ),
        "adapters",
    )


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale * B @ A, in float32."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


def changed_weights(received: Iterable[tuple[str, Tensor]], base: AdapterBase) -> Iterator[tuple[str, Tensor]]:
    """Merges a push of adapters; yields the changed checkpoint tensors.

    Also yields unchanged siblings of each merged weight: engines fuse layers (q, k and v; gate and up) and can only
    reload a fused layer as a whole.

    Raises:
        WeightSyncError: the checkpoint has no such weight.
    """
    factors = {name: tensor.clone() for name, tensor in received}  # cloned: `received` reuses its buffer
    modules = {name.removesuffix(f".{A}") for name in factors if name.endswith(f".{A}")}
    parents = {module.rpartition(".")[0] for module in modules}
    for name, tensor in pushed_tensors(Path(base.folder)):
        module = name.rpartition(".")[0]
        if module.rpartition(".")[0] not in parents:
            continue
        if name == f"{module}.{WEIGHT}" and module in modules:
            modules.remove(module)
            a, b = factors[f"{module}.{A}"], factors[f"{module}.{B}"]
            tensor = merged(tensor.to(a.device), a, b, base.scale)
        yield name, tensor.to(getattr(torch, base.dtype))
    if modules:
        raise WeightSyncError(
            f"{base.folder} has no weight for the adapters of {', '.join(sorted(modules))}: "
            "engines and learner must be given the same policy.model"
        )
