"""A reload packs tied LM heads again wherever they are in the model, and finds layers that a push has left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from mobula.actors.samplers.vllm.weights import _refuse_stale_layers, _unsent_layers_apart
from mobula.cluster.errors import WeightSyncError


def vocabulary(kind: type[nn.Module], weight: nn.Parameter) -> nn.Module:
    """A layer of vLLM without its constructor, which needs an engine's process groups; `packed` is the copy of its
    weight that kernels on CPU read."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.weight = weight

    def pack(layer: nn.Module) -> None:
        layer.packed = layer.weight.detach().clone()

    layer.quant_method = SimpleNamespace(process_weights_after_loading=pack)
    pack(layer)
    return layer


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.ones(2), persistent=False)
        self.apply_rotary = nn.Module()


class Model(nn.Module):
    """`head_at` is the module that holds the head: the model itself, or the language model inside it."""

    def __init__(self, head_at: str, *, is_tied: bool) -> None:
        super().__init__()
        weight = nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.language_model = nn.Module()
        self.language_model.embed_tokens = vocabulary(VocabParallelEmbedding, weight)
        self.language_model.rotary = Rotary()
        own = weight if is_tied else nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.head = vocabulary(ParallelLMHead, own)
        self.get_submodule(head_at).lm_head = self.head
        del self._modules["head"]
        object.__setattr__(self, "head", self.get_submodule(head_at).lm_head)

    @property
    def layers(self) -> list[str]:
        return [name for name, _ in self.named_modules()]


@pytest.mark.parametrize("head_at", ["", "language_model"])
def test_a_tied_head_is_packed_from_the_new_embedding(head_at: str) -> None:
    model = Model(head_at, is_tied=True)
    before = model.layers
    with _unsent_layers_apart(model):
        assert not any(isinstance(layer, ParallelLMHead | Rotary) for layer in model.modules())
        model.language_model.embed_tokens.weight.fill_(7.0)
    assert model.layers == before, "in the same order"
    assert torch.equal(model.head.packed, torch.full((4, 2), 7.0))


def test_an_untied_head_is_loaded_as_every_layer_is() -> None:
    model = Model("", is_tied=False)
    with _unsent_layers_apart(model):
        assert model.lm_head is model.head


def test_a_reload_that_fails_leaves_the_layers_in_place() -> None:
    model = Model("language_model", is_tied=True)
    before = model.layers
    with pytest.raises(RuntimeError), _unsent_layers_apart(model):
        raise RuntimeError
    assert model.layers == before


def reloading(numel: int, missing: int, *loaded: str) -> nn.Module:
    """A layer of 4 weights and 2 biases in the middle of a reload; `loaded` names what its loaders were called for."""
    layer = nn.Linear(2, 2)
    info = get_layerwise_info(layer)
    info.load_numel, info.load_numel_total = numel, numel + missing
    info.loaded_weights = [(name, inspect.signature(len).bind(())) for name in loaded]
    return layer


def vocabulary_of_three(missing: int) -> nn.Module:
    """An embedding of 3 tokens in 4 rows of 2, which a push lacks `missing` elements of."""
    layer = vocabulary(VocabParallelEmbedding, nn.Parameter(torch.zeros(4, 2), requires_grad=False))
    layer.num_embeddings_per_partition, layer.shard_indices = 4, SimpleNamespace(num_org_elements=3)
    info = get_layerwise_info(layer)
    info.load_numel, info.load_numel_total = 8 - missing, 8
    info.loaded_weights = [("weight", inspect.signature(len).bind(()))]
    return layer


def test_a_layer_that_a_push_has_nothing_for_is_named() -> None:
    model = nn.ModuleDict({"left_out": reloading(0, 6), "complete": nn.Linear(2, 2), "constant": Rotary()})
    with pytest.raises(WeightSyncError, match=r"not all tensors for 1 layers of the engine \(left_out\)"):
        _refuse_stale_layers(model, takes_all=True)
    _refuse_stale_layers(model, takes_all=False)


@pytest.mark.parametrize("takes_all", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: reloading(4, 2, "weight"), id="no bias"),
        pytest.param(lambda: reloading(5, 1, "weight", "bias"), id="a part of one"),
        pytest.param(lambda: vocabulary_of_three(missing=4), id="a row of an embedding"),
    ],
)
def test_a_layer_that_a_push_has_not_everything_for_is_named(layer: Callable[[], nn.Module], takes_all: bool) -> None:
    model = nn.ModuleDict({"complete": nn.Linear(2, 2), "partial": layer()})
    with pytest.raises(WeightSyncError, match=r"not all tensors for 1 layers of the engine \(partial\)"):
        _refuse_stale_layers(model, takes_all=takes_all)


def test_padding_and_buffers_come_with_no_push() -> None:
    with_buffer = reloading(6, 2, "weight", "bias")
    with_buffer.register_buffer("scale", torch.ones(2))
    model = nn.ModuleDict({"buffer": with_buffer, "padded": vocabulary_of_three(missing=2)})
    _refuse_stale_layers(model, takes_all=True)
