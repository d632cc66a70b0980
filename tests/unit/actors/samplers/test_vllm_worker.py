"""Parts of vLLM's worker: reloads, adapters, tied heads, and images that it gets."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable
from dataclasses import fields
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.sched import output

from mobula.actors.samplers.vllm import patches
from mobula.actors.samplers.vllm.patches import expand, expand_slice, keep_images, shrink
from mobula.actors.samplers.vllm.weights import (
    MobulaWeightTransferEngine,
    _experts_packed_again,
    _refuse_stale_layers,
    _unsent_layers_apart,
)
from mobula.cluster.errors import WeightSyncError
from mobula.deploy.preflight.findings import engine_build


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own function is put back after the test."""
    monkeypatch.setattr(output, "strip_covered_mm_data", output.strip_covered_mm_data)


def _request(num_computed_tokens: int) -> SimpleNamespace:
    pixels = MultiModalFieldElem(data=torch.ones(4), field=MultiModalBatchedField())
    grid = MultiModalFieldElem(data=torch.tensor([1, 2, 2]), field=MultiModalBatchedField(keep_on_cpu=True))
    image = MultiModalFeatureSpec(
        data=MultiModalKwargsItem({"pixel_values": pixels, "image_grid_thw": grid}),
        modality="image",
        identifier="image",
        mm_position=PlaceholderRange(offset=2, length=8),
    )
    others = dict.fromkeys(("sampling_params", "pooling_params", "lora_request", "prompt_embeds"))
    return SimpleNamespace(
        request_id="7",
        prompt_token_ids=list(range(20)),  # the image takes those from 2 to 10
        mm_features=[image],
        num_computed_tokens=num_computed_tokens,
        prompt_is_token_ids=None,
        replay_start=0,
        **others,
    )


def _sent(num_computed_tokens: int) -> output.NewRequestData:
    return output.NewRequestData.from_request(_request(num_computed_tokens), ([0, 1],), uses_mrope=True)


@pytest.mark.parametrize("num_computed_tokens", [0, 9])
def test_a_request_whose_image_is_not_covered_is_sent_as_by_vllm(unpatched: None, num_computed_tokens: int) -> None:
    before = _sent(num_computed_tokens)
    keep_images()
    assert _sent(num_computed_tokens) == before


def test_a_covered_image_is_sent_and_all_else_is_as_in_vllm(unpatched: None) -> None:
    before = _sent(16)
    keep_images()
    after = _sent(16)
    assert list(before.mm_features[0].data) == ["image_grid_thw"], "vLLM leaves the pixels out: the patch is needed"
    assert sorted(after.mm_features[0].data) == ["image_grid_thw", "pixel_values"]
    others = [field.name for field in fields(after) if field.name != "mm_features"]
    assert [getattr(after, name) for name in others] == [getattr(before, name) for name in others]


def _core(failures: Connection, answers: Connection) -> None:
    """In the spawned process: `run_core` with a function in place of vLLM's loop."""
    patches.RUN_ENGINE_CORE = lambda: answers.send(output.strip_covered_mm_data.__module__)
    patches.run_core(failures)


@pytest.mark.slow
def test_the_core_of_a_process_of_its_own_keeps_images() -> None:
    """The workers, which import `weights`, are other processes if `tensor_parallel` is above 1."""
    context = multiprocessing.get_context("spawn")
    answers, answer = context.Pipe(duplex=False)
    failures, failure = context.Pipe(duplex=False)
    process = context.Process(target=_core, args=(failure, answer))
    process.start()
    assert answers.poll(120)
    assert answers.recv() == keep_images.__module__
    process.join(60)
    assert (process.exitcode, failures.poll()) == (0, False)


def test_the_core_of_an_engine_in_process_keeps_images(unpatched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(arguments: object, stat_loggers: list[Callable] | None) -> str:
        return output.strip_covered_mm_data.__module__

    monkeypatch.setattr(patches.AsyncLLM, "from_engine_args", made)
    assert patches.in_process_engine(SimpleNamespace()) == keep_images.__module__


def model() -> nn.Module:
    found = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    found[0].quant_method = SimpleNamespace(moe_kernel="kernel")
    found[1].quant_method = SimpleNamespace()
    return found


@pytest.mark.parametrize(("device", "inside"), [("cpu", None), ("cuda", "kernel")])
def test_kernels_are_made_again_in_host_memory_alone(device: str, inside: str | None) -> None:
    experts = model()
    with _experts_packed_again(experts, torch.device(device)):
        assert experts[0].quant_method.moe_kernel == inside
        experts[0].quant_method.moe_kernel = "another"
    assert experts[0].quant_method.moe_kernel == ("kernel" if device == "cpu" else "another")


def test_a_reload_that_fails_leaves_the_kernel() -> None:
    experts = model()
    with pytest.raises(RuntimeError), _experts_packed_again(experts, torch.device("cpu")):
        raise RuntimeError
    assert experts[0].quant_method.moe_kernel == "kernel"


class Group:
    """A transfer group that notes whether it was left."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_worker_whose_reload_fails_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(info: Any) -> None:
        raise ValueError("a layer refuses its weights")

    engine, group = object.__new__(MobulaWeightTransferEngine), Group()
    engine._group = group
    monkeypatch.setattr(engine, "parse_update_info", lambda info: info)
    monkeypatch.setattr(engine, "receive_weights", fail)
    with pytest.raises(ValueError, match="a layer refuses"):
        engine.update_weights({})
    assert group.is_closed and engine._group is None


# A reload packs tied LM heads again wherever they are in the model, and finds layers that a push has left out.


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


# Products with the factors of several adapters in a batch: each row has its own, and the base model's rows none.

ON_CPU = pytest.mark.skipif(engine_build() == "cuda", reason="patches engines on CPU alone")

SLOTS, RANK, WIDE, OUT = 3, 4, 10, 6
INDICES = torch.tensor([2, -1, 0, 2, 2, -1, 0])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@ON_CPU
def test_each_row_is_multiplied_with_the_factors_of_its_adapter() -> None:
    inputs, factors, found = drawn(7, WIDE), drawn(SLOTS, 1, RANK, WIDE), torch.full((7, RANK + 2), 9.0)
    shrink(inputs, factors, found, INDICES, 0.5)
    for row, index in enumerate(INDICES.tolist()):
        own = torch.zeros(RANK) if index < 0 else 0.5 * factors[index, 0] @ inputs[row]
        torch.testing.assert_close(found[row], torch.cat([own, torch.zeros(2)]))


@ON_CPU
def test_rows_of_the_base_model_are_unchanged() -> None:
    inputs, factors, before = drawn(7, RANK), drawn(SLOTS, 1, OUT, RANK), drawn(7, OUT)
    for indices in (INDICES, torch.full((7,), -1), torch.full((7,), 1)):
        found = before.clone()
        expand(inputs, factors, found, indices)
        for row, index in enumerate(indices.tolist()):
            own = torch.zeros(OUT) if index < 0 else factors[index, 0] @ inputs[row]
            torch.testing.assert_close(found[row], before[row] + own)


@ON_CPU
def test_a_slice_changes_its_columns_alone() -> None:
    inputs, factors, before = drawn(7, RANK), drawn(SLOTS, 1, OUT, RANK), drawn(7, 3 * OUT)
    found = before.clone()
    expand_slice(inputs, factors, found, INDICES, OUT, OUT)
    assert torch.equal(found[:, :OUT], before[:, :OUT])
    assert torch.equal(found[:, 2 * OUT :], before[:, 2 * OUT :])
    torch.testing.assert_close(found[2, OUT : 2 * OUT], before[2, OUT : 2 * OUT] + factors[0, 0] @ inputs[2])
    expand_slice(inputs, factors, found, INDICES, OUT, OUT, add_inputs=False)
    torch.testing.assert_close(found[3, OUT : 2 * OUT], factors[2, 0] @ inputs[3])
    assert not found[1, OUT : 2 * OUT].any()


@ON_CPU
def test_a_padded_head_and_a_head_without_padding_share_their_common_columns() -> None:
    inputs, factors = drawn(2, RANK), drawn(SLOTS, 1, OUT, RANK)
    for width in (OUT - 2, OUT + 2):
        found = torch.zeros(2, width)
        expand(inputs, factors, found, torch.tensor([1, -1]))
        common = min(width, OUT)
        torch.testing.assert_close(found[0, :common], (factors[1, 0] @ inputs[0])[:common])
        assert not found[0, common:].any()
