"""Memory of models that make images: passes of the network on torch's meta device, counted tensor by tensor."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as symbolic
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from mobula.cluster.records.trajectory import NO_IDS, Prompt
from mobula.cluster.weight_sync.manifest import DTYPE_BYTES, Manifest, TensorSpec
from mobula.configs.schema import RunConfig
from mobula.learner.policies.families import frozen_prefixes
from mobula.learner.policies.flow.checkpoint import VAE, FlowCheckpoint, described_folder
from mobula.learner.policies.flow.codec import vae_of
from mobula.learner.policies.flow.families import TRANSFORMER
from mobula.learner.policies.flow.family import MIN_ROWS, decoded
from mobula.learner.policies.flow.patches import codec_folder, grid_of, model_config
from mobula.learner.policies.flow.policy import CONDITION, WHERE, Denoising, LatentSequence
from mobula.learner.policies.flow.tiny import write_tiny_flow
from mobula.learner.policies.flow.tiny.patches import write_tiny_patches
from mobula.learner.policies.loading import DTYPES, recompute_blocks
from mobula.learner.policies.shapes import ImageShape, cache_shape, described_manifest, described_model, num_parameters
from mobula.learner.policies.trained import as_policy, collate_rows, scoring_of

META = torch.device("meta")


class _Counted(TorchDispatchMode):
    """Counts the bytes of what operations return, and the `most` at a time. Parameters and views do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._now = self.most = 0
        self._known = weakref.WeakKeyDictionary({p.untyped_storage(): True for p in model.state_dict().values()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            if storage not in self._known:
                self._known[storage] = True
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self._now += num_bytes
        self.most = max(self.most, self._now)


class _WithoutValues(TorchFunctionMode):
    """Computes attention without a matrix of all pairs of tokens, as the kernels of other devices do. transformers
    reads one value, whether each row is a single sequence; it is true."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__:
            return True
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs))[:3]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]


@dataclass(frozen=True)
class _Parts:
    """What a plan needs of the two kinds of models."""

    networks: Sequence[nn.Module]  # of one shape
    manifest: Manifest
    frozen: tuple[str, ...]  # beginnings of names
    vae: nn.Module
    latents: Tensor  # [1, ...]: of one image
    pixels: Callable[[nn.Module, Tensor], Tensor]  # (VAE, latents) -> image
    prompt: Prompt
    encoders: Sequence[nn.Module] = ()
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of an encoded prompt
    cache: int = 0  # values of the caches of one image


def policy_image_shape(config: RunConfig) -> ImageShape:
    """The shape of `policy.model`, of which no weights are read or downloaded; a missing tiny model is written to a
    temporary folder."""
    policy = config.policy
    with TemporaryDirectory(prefix="mobula-plan-") as temporary:
        if policy.tiny == "none" or Path(policy.model).is_dir():
            folder = described_folder(policy.model)
        elif config.sampler.draws_patches:
            folder = write_tiny_patches(Path(temporary))
        else:
            folder = write_tiny_flow(policy.tiny, Path(temporary))
        return image_shape(config.model_copy(update={"policy": policy.model_copy(update={"model": str(folder)})}))


def image_shape(config: RunConfig) -> ImageShape:
    """The shape of the model in the folder `policy.model`."""
    flow, is_flow = config.sampler.flow, config.sampler.is_flow
    if flow.window_size:
        flow = flow.model_copy(update={"window_end": flow.window_start + flow.window_size})
        config = config.model_copy(update={"sampler": config.sampler.model_copy(update={"flow": flow})})
    parts = (_flow_parts if is_flow else _patch_parts)(config, Denoising.of(flow))
    model, *_ = parts.networks
    policy, scoring = as_policy(model, config), scoring_of(config, ())
    canary = cast(LatentSequence, scoring.canary_row(parts.prompt))
    row = cast(LatentSequence, scoring.row(parts.prompt, canary.actions))
    inputs = {name: np.zeros((1, *shape), np.float32) for name, shape in parts.inputs.items()}
    reader = SimpleNamespace(read=lambda handles: [ProcessedMedia(CONDITION, inputs)] * len(handles))
    batch = collate_rows([row], cast(MediaReader, reader), META)
    blocks = [num_parameters(block) for block in policy.blocks()]
    num_passes = row.num_predictions if is_flow else 1
    dtype = config.resources.dtype
    trained = dtype if config.learner.backend == "fsdp2" else "float32"  # others compute with autocast
    score = partial(policy.train(), batch, scoring.canary)
    sampled = _most(score, policy, dtype, keeps=False)
    kept = _most(score, policy, trained, keeps=True)
    recompute_blocks(model, "blocks")  # the backward pass computes one block at a time again
    return ImageShape(
        parts.manifest,
        largest_block=max(blocks),
        num_in_blocks=len(parts.networks) * sum(blocks),
        frozen=parts.frozen,
        row_tokens=row.num_tokens,
        least_rows=ceil(MIN_ROWS[config.resources.device] / num_passes) if is_flow else 1,
        kept=kept,
        kept_inputs=_most(score, policy, trained, keeps=True) + kept // len(blocks),
        sampled=sampled // num_passes + parts.cache * DTYPE_BYTES[dtype],
        decoded=_most(partial(parts.pixels, parts.vae, parts.latents), parts.vae, dtype, keeps=False),
        num_others=num_parameters(parts.vae),
        num_encoders=sum(map(num_parameters, parts.encoders)),
    )


def _flow_parts(config: RunConfig, how: Denoising) -> _Parts:
    checkpoint, flow = FlowCheckpoint(config.policy.model), config.sampler.flow
    networks = {name: checkpoint.described(name) for name in checkpoint.networks}
    whole = networks[TRANSFORMER] if len(networks) == 1 else nn.ModuleDict(networks)
    handles = (MediaHandle("prompt", CONDITION, 0, None), MediaHandle("negative", CONDITION, 0, None))
    num = 1 + checkpoint.takes_negatives(flow.guidance)
    vae, encoders = checkpoint.described(VAE), [checkpoint.described(name) for name in checkpoint.encoders]
    return _Parts(
        list(networks.values()),
        Manifest(tuple(TensorSpec(name, tuple(p.shape), "float32") for name, p in whole.named_parameters())),
        config.policy.freeze,
        vae,
        torch.zeros(1, *checkpoint.latent_shape(how), device=META),
        checkpoint.family.pixels,
        Prompt("", "", "", NO_IDS, NO_IDS, handles[:num], (WHERE,) * num),
        [*encoders, vae] if how.num_images else encoders,
        checkpoint.encoded_shapes(how, flow.max_text_tokens),
    )


def _patch_parts(config: RunConfig, how: Denoising) -> _Parts:
    source = config.policy.model
    own, grid = model_config(source), grid_of(source, how.size)
    model, side = described_model(own), own.latent_patch_size
    with META:
        vae = vae_of(json.loads((codec_folder(source) / "config.json").read_text(encoding="utf-8")))
    ids = np.zeros(config.data.max_prompt_tokens, dtype=np.int32)
    num_positions = (1 if how.guidance == 1 else 2) * (len(ids) + grid.num_tokens)
    return _Parts(
        [model],
        described_manifest(model),
        (*frozen_prefixes(config.policy), "lm_head."),
        vae,
        torch.zeros(1, own.latent_channels, side * grid.rows, side * grid.columns, device=META),
        decoded,
        Prompt("", "", "", ids, ids),
        cache=num_positions * cache_shape(own).width * own.num_hidden_layers,
    )


def _most(call: Callable[[], object], network: nn.Module, dtype: str, *, keeps: bool) -> int:
    """Bytes at the peak of a call; `keeps`: with what a backward pass would need."""
    nn.Module.to(network, DTYPES[dtype])
    whole = symbolic.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]  # the masks of texts
    with whole, torch.set_grad_enabled(keeps), _WithoutValues(), _Counted(network) as count:
        call()
    return count.most
