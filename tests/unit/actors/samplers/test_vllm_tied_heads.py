"""A reload packs tied LM heads again wherever they are in the model, and finds layers that a push has left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from actors.samplers.vllm.weights import _refuse_stale_layers, _unsent_layers_apart
from cluster.errors import WeightSyncError


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


def test_a_layer_that_a_push_has_nothing_for_is_named() -> None:
    model = nn.ModuleDict({"loaded": nn.Linear(2, 2), "left_out": nn.Linear(2, 2), "constant": Rotary()})
    for layer in model.modules():
        get_layerwise_info(layer).load_numel_total = 6
    get_layerwise_info(model["loaded"]).load_numel = 6
    with pytest.raises(WeightSyncError, match=r"no tensor for 1 layers of the engine \(left_out\)"):
        _refuse_stale_layers(model)
    get_layerwise_info(model["left_out"]).load_numel = 6
    _refuse_stale_layers(model)
