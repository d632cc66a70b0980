"""Weight transfer and adapters of a vLLM engine."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from mobula.actors.samplers.served import ServedAdapter
from mobula.actors.samplers.vllm.arguments import LOAD_FORMAT, WEIGHT_TRANSFER
from mobula.actors.samplers.vllm.patches import adapt_rows_of_each_adapter, seed_by_position
from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.changes import Base
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup, unpack_all
from mobula.learner.policies.adapters import AdapterBase, changed_weights
from mobula.learner.policies.checkpoint import loaded_tensors, pushed_tensors

# Loads and unloads adapters in a vLLM engine.
#
# vLLM ignores factors of modules that it does not adapt (such as those of a vision tower), so each rank is asked for
# them after loading. Its prefix cache distinguishes adapters by name and path; the name that it gets contains the
# adapter's number, so a name that is served again shares nothing with its earlier weights.

MAX_NAMED = 5  # module names in an error message


def lora_request(adapter: ServedAdapter | None) -> LoRARequest | None:
    """Returns how a request names its adapter; None for the base model."""
    if adapter is None:
        return None
    return LoRARequest(f"{adapter.number}:{adapter.name}", adapter.number, str(adapter.folder))


async def load_adapter(engine: AsyncLLM, adapter: ServedAdapter) -> None:
    request = lora_request(adapter)
    assert request is not None
    try:
        await engine.add_lora(request)
    except EngineDeadError:
        raise
    except Exception as error:  # vLLM's core answers with a bare Exception
        raise ValueError(f"vLLM cannot serve adapter {adapter.name!r}: {error}") from error
    ranks = await engine.collective_rpc("ignored_adapter_modules", args=(adapter.number,))
    if ignored := sorted({module for rank in ranks for module in rank}):
        await engine.remove_lora(adapter.number)
        raise ValueError(
            f"vLLM would ignore {len(ignored)} modules of adapter {adapter.name!r} "
            f"({', '.join(ignored[:MAX_NAMED])}): train adapters of the language model alone, or use "
            "sampler=huggingface"
        )


# Runs inside vLLM's worker process: our weight-transfer engine for vLLM's registry, over gloo or nccl.
#
# vLLM has no transport for CPU, and `load_weights` alone has no effect on CPU because linear layers pack their weights
# after loading. A push therefore uses vLLM's layer-wise reload, which rebuilds and processes every layer from tensors
# in checkpoint format. vLLM imports this module in every worker, because `worker_extension_cls` names
# `WorkerExtension`; the import registers engine and loader, and applies `seed_by_position` and
# `adapt_rows_of_each_adapter`.


@register_model_loader(LOAD_FORMAT)
class CheckpointLoader(DefaultModelLoader):
    """Loads the same tensors as the learner."""

    def download_model(self, model_config: Any) -> None:
        _folder(model_config.model)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Generator[tuple[str, torch.Tensor]]:
        # If the files have an output embedding, vLLM builds a separate layer for it and ties equal embeddings later.
        is_apart = model_config.word_embeddings_untied_by_checkpoint
        yield from (loaded_tensors if is_apart else pushed_tensors)(_folder(model_config.model))


def _folder(model: str) -> Path:
    return Path(model) if Path(model).is_dir() else Path(snapshot_download(model))


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """The transfer group to join; `rank` is the group rank of the engine's first rank."""

    rendezvous: dict[str, Any]
    rank: int


@dataclass
class PushInfo(WeightTransferUpdateInfo):
    """The content of one push. `buckets` has packed bytes with digests that were not sent over the transfer group,
    `tensors` the tensors already received over it. `adapters` describes the merge of adapters. Without `takes_all`
    whole layers may be missing."""

    manifest: dict[str, Any]
    bucket_bytes: int
    version: int
    takes_all: bool
    buckets: list[bytes] | None = None
    tensors: list[tuple[str, torch.Tensor]] | None = None
    adapters: dict[str, Any] | None = None


class MobulaWeightTransferEngine(WeightTransferEngine[JoinInfo, PushInfo]):
    """Receives packed buckets and reloads the model layer by layer. With `weight_sync.payload=delta` it applies the
    changes to a copy of the pushed tensors in host memory, and reloads from there: vLLM's parameters are fused, split
    over ranks and packed, so that no position in them is known."""

    init_info_cls = JoinInfo
    update_info_cls = PushInfo

    _group: TransferGroup | None = None
    _base: Base | None = None  # the pushed tensors, with payload delta

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        self.shutdown()
        # Every rank of an engine receives all tensors and keeps its shard.
        rank = init_info.rank + self.parallel_config.rank
        self._group = TransferGroup(Rendezvous(**init_info.rendezvous), rank, torch.device(self.device))

    def start_weight_update(self) -> None:
        """Prepares a full reload, or a merge of adapters."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class calls torch.accelerator.synchronize(), which fails on a machine without accelerator. Our
        # broadcasts need no synchronisation: they return after the data arrived.
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.shutdown()  # other members must not wait for this one
            raise

    def receive_weights(self, update_info: PushInfo) -> None:
        manifest = Manifest.from_wire(update_info.manifest)
        tensors: Iterable[tuple[str, torch.Tensor]]
        if update_info.tensors is not None:
            tensors = update_info.tensors
        elif update_info.buckets is not None:
            packed = [np.frombuffer(data, dtype=np.uint8) for data in update_info.buckets]
            tensors = unpack_all(manifest, update_info.bucket_bytes, packed)
            if manifest.payload == "delta":
                tensors = self._held(tensors, update_info.version)
        else:
            tensors = self.receive(manifest, update_info.bucket_bytes, update_info.version)
        if update_info.adapters is not None:
            tensors = changed_weights(tensors, AdapterBase(**update_info.adapters))
        with (
            torch.no_grad(),
            _experts_packed_again(self.model, torch.device(self.device)),
            _unsent_layers_apart(self.model),
        ):
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(tensors)  # type: ignore[operator]  # torch: an attribute is a tensor or a module
                _refuse_stale_layers(self.model, takes_all=update_info.takes_all)
            except BaseException:
                # Layers left incomplete keep their old weights. Otherwise vLLM would count the tensors
                # of the failed push, complete a layer too early in a later push, and drop its last tensors.
                for info in map(get_layerwise_info, self.model.modules()):
                    info.loaded_weights.clear()
                    info.load_numel = 0
                raise
            finally:
                finalize_layerwise_reload(self.model, self.model_config)

    def receive(self, manifest: Manifest, bucket_bytes: int, version: int) -> Iterable[tuple[str, torch.Tensor]]:
        """Yields the tensors of a push in separate memory, because a layer needs several at a time."""
        if self._group is None:
            raise WeightSyncError("this engine is in no transfer group: call join_transfer first")
        if manifest.payload != "delta":
            return self._group.receive(manifest, bucket_bytes, keeps=True)
        base = self._base = self._base or Base()
        for spec in manifest.tensors:
            if spec.name not in base.tensors:
                base.tensors[spec.name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        self._group.receive_changes(manifest, bucket_bytes, base, version)
        return base.tensors.items()

    def _held(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields whole tensors and holds them, for later changes."""
        base = self._base = Base()
        with base.changing_to(version):
            for name, tensor in tensors:
                base.tensors[name] = tensor
                yield name, tensor

    def finish_weight_update(self) -> None:
        """Does nothing: `receive_weights` completes the update."""

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class WorkerExtension:
    """Mixed into vLLM's worker; importing this class registers the engine."""

    model_runner: Any  # of the worker

    def ignored_adapter_modules(self, number: int) -> list[str]:
        """Returns the modules of a loaded adapter that this rank does not adapt."""
        manager = self.model_runner.lora_manager._adapter_manager
        return sorted(set(manager.get_adapter(number).loras) - set(manager.modules))


@contextmanager
def _experts_packed_again(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Packs experts in host memory again at each reload in the body."""
    # vLLM packs experts only when it creates the kernel. After a reload the kernel would read plain weights as packed.
    layers = model.modules() if device.type == "cpu" else ()
    methods = [method for layer in layers if (method := getattr(layer, "quant_method", None)) is not None]
    kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            method.moe_kernel = kernel


@contextmanager
def _unsent_layers_apart(model: torch.nn.Module) -> Iterator[None]:
    """Replaces layers without tensors in any push by identities while the body runs, then packs tied LM heads again."""
    # A reload would keep a tied head's packed copy of the old weight, and warn about every such layer.
    layers = _unsent_layers(model)
    for parent, name, _ in layers:
        setattr(parent, name, torch.nn.Identity())
    try:
        yield
    finally:
        for parent, name, layer in layers:
            setattr(parent, name, layer)
    for head in {layer for _, _, layer in layers if isinstance(layer, ParallelLMHead)}:
        head.quant_method.process_weights_after_loading(head)


def _unsent_layers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Returns (parent, attribute, layer) of the layers that no push has tensors of."""
    # These are LM heads tied to an embedding, and layers with computed constants only, such as rotary embeddings.
    vocabularies = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in vocabularies if not isinstance(layer, ParallelLMHead)}

    def is_unsent(layer: torch.nn.Module) -> bool:
        if isinstance(layer, ParallelLMHead):
            return id(layer.weight) in embeddings
        return any(True for _ in layer.buffers(recurse=False)) and not layer.state_dict()

    children = [(parent, name, layer) for parent in model.modules() for name, layer in parent.named_children()]
    return [(parent, name, layer) for parent, name, layer in children if is_unsent(layer)]


def _refuse_stale_layers(model: torch.nn.Module, *, takes_all: bool) -> None:
    """Refuses a push with incomplete layers, on each rank for its shards; without `takes_all` layers may be missing."""
    # Complete layers are already processed, and vLLM no longer counts their tensors.
    stale = [
        name
        for name, layer in model.named_modules()
        if any(True for _ in layer.parameters(recurse=False))
        and not is_deferred_attention_layer(layer)
        and _is_incomplete(layer, takes_all)
    ]
    if stale:
        raise WeightSyncError(
            f"the push has not all tensors for {len(stale)} layers of the engine ({', '.join(stale[:5])}): they would "
            "keep old weights, so vLLM names tensors of this model otherwise than its checkpoint; use "
            "sampler=huggingface"
        )


def _is_incomplete(layer: torch.nn.Module, takes_all: bool) -> bool:
    info = get_layerwise_info(layer)
    if info.load_numel_total is None:  # not loaded
        return False
    if info.load_numel == 0:
        return takes_all
    parameters = dict(layer.named_parameters(recurse=False))
    buffers = sum(buffer.numel() for buffer in layer.buffers(recurse=False))
    num_missing = info.load_numel_total - info.load_numel - buffers - _num_padding(layer)
    return num_missing > 0 or not parameters.keys() <= {name for name, _ in info.loaded_weights}


def _num_padding(layer: torch.nn.Module) -> int:
    """Returns the number of padding elements of an embedding or LM head: vLLM rounds the number of rows up."""
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    num_rows = layer.num_embeddings_per_partition - layer.shard_indices.num_org_elements
    return sum(num_rows * p.numel() // p.shape[0] for p in layer.parameters(recurse=False))


WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, MobulaWeightTransferEngine)
seed_by_position()
adapt_rows_of_each_adapter()
