"""Adapters (PEFT) in the trained model, and state dicts with adapters read as merged weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobula.configs.schema import LoRAConfig
from mobula.learner.policies.checkpoint.reading import BASE, plain_name
from mobula.learner.policies.lora import WEIGHT, A, B, merged

if TYPE_CHECKING:
    from peft import LoraConfig

NAME = "default"  # PEFT's name of the only adapter
PEFT_PREFIX = "base_model.model."  # prefix of module names in a saved adapter
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
DIFFUSERS_PREFIX = "transformer."  # the pipeline's component with the adapter
Factors = Mapping[tuple[str, str], Tensor]
"""(module, A or B) -> factor."""
FACTORS = {f".lora_A.{NAME}.weight": A, f".lora_B.{NAME}.weight": B}


def add_adapters(model: nn.Module, modules: Collection[str], config: LoRAConfig, seed: int) -> None:
    """Adds an adapter to each of `modules` (state-dict names) and freezes all other parameters. B is 0 at first.

    Every rank draws the same A, independently of its random state.

    Raises:
        ValueError: a module is no linear layer, or is the output layer, which may share its weight.
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
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"{PEFT_PREFIX}{module}.{factor}": tensor.contiguous() for (module, factor), tensor in factors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    modules = sorted({module for module, _ in factors})
    described = _peft_config(
        config, modules, base_model_name_or_path=source, task_type="CAUSAL_LM", inference_mode=True
    )
    described.save_pretrained(str(folder))


def save_pipeline_adapters(folder: Path, factors: Factors, config: LoRAConfig) -> None:
    """Writes the adapters of a pipeline's transformer, for `load_lora_weights` of diffusers."""
    modules = sorted({module for module, _ in factors})
    described = {
        f"{DIFFUSERS_PREFIX}{key}": _listed(value) for key, value in _peft_config(config, modules).to_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"{DIFFUSERS_PREFIX}{module}.{factor}": tensor.contiguous() for (module, factor), tensor in factors.items()},
        folder / DIFFUSERS_FILE,
        metadata={"format": "pt", "lora_adapter_metadata": json.dumps(described, indent=2, sort_keys=True)},
    )


def _peft_config(config: LoRAConfig, modules: Collection[str], **own: Any) -> LoraConfig:
    # Imported here, because the import takes seconds.
    from peft import LoraConfig

    alpha: Any = config.alpha  # declared as an integer, only divided by the rank
    return LoraConfig(r=config.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(modules), **own)


def _listed(value: object) -> object:
    """Converts a value of PEFT's configuration to a JSON type."""
    return sorted(value) if isinstance(value, set) else value


def with_saved_adapters(model: PreTrainedModel, folder: Path) -> nn.Module:
    """Merges the adapters of `save_adapters` into the model, with PEFT."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder).merge_and_unload()


def load_adapter(model: PreTrainedModel, folder: Path, name: str) -> None:
    """Adds the adapter of `save_adapters`, or of another PEFT folder, beside the model's other adapters.

    `choose_adapter` selects it.

    Raises:
        ValueError: the adapter does not fit the model; the model is unchanged.
    """
    loaded = model.load_adapter(str(folder), adapter_name=name)
    missing = [key for key in loaded.missing_keys if f".{name}." in key]  # others are of the model's other adapters
    if wrong := sorted({*missing, *loaded.unexpected_keys}):
        model.delete_adapter(name)
        raise ValueError(f"the adapter in {folder} does not fit the model: {', '.join(wrong[:5])} have no counterpart")


def choose_adapter(model: nn.Module, name: str | None) -> None:
    """Lets the model compute with one adapter of `load_adapter`, or without any."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in (module for module in model.modules() if isinstance(module, BaseTunerLayer)):
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name)


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has adapters."""
    return any(is_factor(name) for name, _ in model.named_parameters())


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disables adapters for the body."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
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
