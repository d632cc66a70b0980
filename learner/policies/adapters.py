"""Adapters of a policy (LoRA) by PEFT: targets, sizes and files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.configs.schema import LoRAConfig, PolicyConfig, RunConfig
from mobula.learner.policies.checkpoint import BASE, plain_name, pushed_tensors
from mobula.learner.policies.families import LANGUAGE, PART_NAMES, frozen_prefixes
from mobula.learner.policies.loading import checkpoint_names
from mobula.learner.policies.quantised import quantise_layers, takes
from mobula.learner.policies.shapes import ModelShape, layer_kind, shape_of

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

# Low-rank adapters as tensors: adapted weights, names in a push, and merging.
#
# An adapter of a weight W [out, in] is A [rank, in] and B [out, rank]; the effective weight is W + scale * B @ A.
# Names are based on the checkpoint: the adapter of `model.layers.0.self_attn.q_proj.weight` is sent as
# `...q_proj.lora_A.weight` and `...q_proj.lora_B.weight`. Learner and engines determine adapted weights by the same
# rule, each from its model. Source: arXiv:2106.09685.

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
    """
    key, frozen = "policy.lora.target_modules", frozen_prefixes(policy)
    named = linear_modules(manifest, policy, policy.lora.target_modules, key, shape)
    adapted = {m: size for m, size in named.items() if not f"{m}.{WEIGHT}".startswith(frozen)}
    if not adapted:
        raise ValueError(
            f"policy.freeze={list(policy.freeze)} takes away every layer of policy.lora.target_modules="
            f"{list(policy.lora.target_modules)}, so nothing would be trained: change one of the two"
        )
    return adapted


def linear_modules(
    manifest: Manifest, policy: PolicyConfig, targets: Sequence[str], key: str, shape: ModelShape | None = None
) -> dict[str, tuple[int, int]]:
    """Module -> shape of its weight, of the parts and layer names `targets`, the value of `key`."""
    matrices = {
        spec.name.removesuffix(f".{WEIGHT}"): spec.shape
        for spec in manifest.tensors
        if len(spec.shape) == 2 and spec.name.endswith(f".{WEIGHT}")
    }
    kinds = {layer_kind(module) for module in matrices}
    named = [target for target in targets if target not in kinds]
    is_part = any(target in PART_NAMES for target in named)
    parts = _linear_layers(manifest, matrices, shape or shape_of(policy.model)) if is_part else {LANGUAGE: []}
    unknown = [target for target in named if target not in parts or not is_part]
    if unknown:
        raise ValueError(
            f"{key}: no matrix of the model is called {', '.join(unknown)}; there are {', '.join(sorted(kinds))}: name "
            f"some of these, or a part of a token model: {', '.join(sorted(parts))}"
        )
    wanted = {module for target in named for module in parts[target]}
    wanted |= {module for module in matrices if layer_kind(module) in targets}
    return {module: size for module, size in matrices.items() if module in wanted}


def quantised_modules(
    manifest: Manifest, policy: PolicyConfig, shape: ModelShape | None = None
) -> dict[str, tuple[int, int]]:
    """Module whose weight `policy.quantisation` holds in few bits -> shape of the weight."""
    key, kind = "policy.quantisation_modules", policy.quantisation
    named = linear_modules(manifest, policy, policy.quantisation_modules, key, shape)
    return {module: size for module, size in named.items() if takes(size, kind)}


def quantise_base(model: PreTrainedModel, config: RunConfig) -> None:
    """Makes the layers of `policy.quantisation_modules` quantised ones, in a model on the meta device."""
    policy = config.policy
    if policy.quantisation == "none":
        return
    states = {name: state for state, name in checkpoint_names(model).items()}
    shapes = model.state_dict()
    manifest = Manifest(tuple(TensorSpec(name, tuple(shapes[s].shape), DTYPE) for name, s in states.items()))
    modules = quantised_modules(manifest, policy)
    layers = {states[f"{module}.{WEIGHT}"].removesuffix(f".{WEIGHT}") for module in modules}
    output = model.get_output_embeddings()
    chosen = [n for n, m in model.named_modules() if n in layers and type(m) is nn.Linear and m is not output]
    quantise_layers(model, chosen, policy.quantisation, getattr(torch, config.resources.dtype))


def _linear_layers(manifest: Manifest, matrices: Iterable[str], shape: ModelShape) -> dict[str, list[str]]:
    """Part of the model -> linear layers; `language` is the decoder, also for models without a family file."""
    names, last = {spec.name for spec in manifest.tensors}, shape.decoder[-1]
    above = (name.removesuffix(last) for name in names if name.endswith(last))
    decoder = tuple(start for start in above if all(f"{start}{weight}" in names for weight in shape.decoder))
    linear = [module for module in matrices if layer_kind(module) in shape.linear_kinds]
    starts = {**shape.family.parts, LANGUAGE: decoder}
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


NAME = "default"  # PEFT's name of the only adapter
PEFT_PREFIX = "base_model.model."  # prefix of module names in a saved adapter
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
DIFFUSERS_PREFIX = "transformer."  # the pipeline's component with the adapter
SECOND = "transformer_2"  # the component for low noise levels, in pipelines with two
Factors = Mapping[tuple[str, str], Tensor]  # (module, A or B) -> factor
FACTORS = {f".lora_A.{NAME}.weight": A, f".lora_B.{NAME}.weight": B}


def add_adapters(model: nn.Module, modules: Collection[str], config: LoRAConfig, seed: int) -> None:
    """Adds an adapter to each of `modules` (state-dict names) and freezes all other parameters. B is 0 at first.

    Every rank draws the same A, independently of its random state.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    output_layer = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for name in modules:
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear) or module is output_layer:
            raise ValueError(
                f"policy.lora.target_modules: {name} is {type(module).__name__} and takes no adapter here: "
                "name linear layers other than the output layer"
            )
    peft = _peft_config(config, modules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft, model)
        for layer in map(model.get_submodule, modules):
            assert isinstance(layer, LoraLayer)
            for factors in (layer.lora_A, layer.lora_B):  # on the meta device, if the weight is
                factors.to_empty(device="cpu").float()  # adapters are trained in float32
            layer.reset_lora_parameters(NAME, init_lora_weights=True)
    adapted = {name.partition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert adapted == set(modules), "PEFT matches suffixes of names, and these are whole names"


def factors_of(state: Mapping[str, Tensor]) -> Factors:
    """The factors in the state dict of a model with adapters."""
    return {split_factor(name): tensor for name, tensor in state.items() if is_factor(name)}


def save_adapters(folder: Path, factors: Factors, config: LoRAConfig, source: str) -> None:
    """Writes adapters in PEFT's format; `source` is the base checkpoint (`policy.model`)."""
    _write_factors(folder / "adapter_model.safetensors", factors, PEFT_PREFIX)
    modules = sorted({module for module, _ in factors})
    described = _peft_config(
        config, modules, base_model_name_or_path=source, task_type="CAUSAL_LM", inference_mode=True
    )
    described.save_pretrained(str(folder))


def save_pipeline_adapters(folder: Path, factors: Factors, config: LoRAConfig) -> None:
    """Writes the adapters of a pipeline's transformer, for `load_lora_weights` of diffusers; those of a second one into
    the folder transformer_2, for the same with `load_into_transformer_2=True`."""
    networks: dict[str, dict[tuple[str, str], Tensor]] = {}
    for (module, factor), tensor in factors.items():
        network = SECOND if module.startswith(f"{SECOND}.") else ""
        name = module.removeprefix(f"{network}." if network else DIFFUSERS_PREFIX)
        networks.setdefault(network, {})[name, factor] = tensor
    for network, own in networks.items():
        _save_network_adapters(folder / network, own, config)


def _save_network_adapters(folder: Path, factors: Factors, config: LoRAConfig) -> None:
    settings = _peft_config(config, sorted({module for module, _ in factors})).to_dict().items()
    described = {f"{DIFFUSERS_PREFIX}{k}": sorted(v) if isinstance(v, set) else v for k, v in settings}  # sets: no JSON
    text = json.dumps(described, indent=2, sort_keys=True)
    _write_factors(folder / DIFFUSERS_FILE, factors, DIFFUSERS_PREFIX, lora_adapter_metadata=text)


def _write_factors(file: Path, factors: Factors, prefix: str, **metadata: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{prefix}{module}.{factor}": tensor.contiguous() for (module, factor), tensor in factors.items()}
    save_file(tensors, file, metadata={"format": "pt", **metadata})


def _peft_config(config: LoRAConfig, modules: Collection[str], **own: Any) -> LoraConfig:
    # Imported here, because the import takes seconds.
    from peft import LoraConfig

    alpha: Any = config.alpha  # declared as an integer, only divided by the rank
    return LoraConfig(r=config.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(modules), **own)


def load_adapter(model: PreTrainedModel, folder: Path, name: str) -> None:
    """Adds the adapter of `save_adapters`, or of another PEFT folder, beside the model's other adapters.

    `choose_adapter` selects it.
    """
    loaded = model.load_adapter(str(folder), adapter_name=name)
    missing = [key for key in loaded.missing_keys if f".{name}." in key]  # others are of the model's other adapters
    if wrong := sorted({*missing, *loaded.unexpected_keys}):
        model.delete_adapter(name)
        raise ValueError(f"the adapter in {folder} does not fit the model: {', '.join(wrong[:5])} have no counterpart")


def choose_adapter(model: nn.Module, name: str | None) -> None:
    """Lets the model compute with one adapter of `load_adapter`, or without any."""
    for layer in _adapted_layers(model):
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name)


def _adapted_layers(model: nn.Module) -> list[BaseTunerLayer]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def has_adapters(model: nn.Module) -> bool:
    return any(is_factor(name) for name, _ in model.named_parameters())


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disables adapters for the body."""
    layers = _adapted_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def is_factor(name: str) -> bool:
    """Whether `name` is the state-dict name of an adapter's A or B."""
    return name.endswith(tuple(FACTORS))


def split_factor(name: str) -> tuple[str, str]:
    """(module, A or B) from a factor's state-dict name."""
    suffix = next(suffix for suffix in FACTORS if name.endswith(suffix))
    return name.removesuffix(suffix), FACTORS[suffix]


def as_merged(state: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Merges adapters in a state dict, and renames weights as in a model without adapters.

    A merged weight is yielded at the position of B: weight, A and B of a module are adjacent, in this order.
    """
    held: dict[str, Tensor] = {}
    for name, tensor in state:
        if is_factor(name):
            module, factor = split_factor(name)
            held[factor] = tensor
            if factor == B:
                yield f"{module}.{WEIGHT}", merged(held[WEIGHT], held[A], held[B], scale)
                held = {}
        elif name.endswith(f"{BASE}{WEIGHT}"):
            held[WEIGHT] = tensor
        else:
            yield plain_name(name), tensor
