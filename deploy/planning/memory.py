"""Bytes of one worker of each role, on its device and in host memory, by part and by phase of a step.

Every number follows from the configuration and the checkpoint's config.json, but for reward models and judges on GPUs,
which are planned with the share of a GPU that they book. The estimate excludes memory that libraries allocate beyond
the constants below. About 400 MiB of a process with torch are pages of libraries: the processes of a node share them,
and the estimate counts them for each process. Stage `throughput` of `mobula gpu-check` compares the learner's estimate
with torch's allocations; on one H100 torch allocated 0.91 of the estimate.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from huggingface_hub.constants import ENDPOINT

from mobula.cluster.errors import PreflightError
from mobula.cluster.weight_sync.manifest import DTYPE_BYTES, TensorSpec
from mobula.cluster.weight_sync.shared_ring import CHUNK_BYTES, NUM_CHUNKS
from mobula.configs.overrides import MISSING
from mobula.configs.schema import RunConfig, SamplerKind
from mobula.configs.schema.rewards import RewardComponent
from mobula.deploy.planning.activations import (
    FLOAT32,
    PATCH_CHANNELS,
    Microbatch,
    engine_bytes,
    logits_bytes,
    step_rows,
    training_bytes,
)
from mobula.deploy.preflight.findings import refusing
from mobula.learner.backends.sharded import MAX_COPY_BYTES
from mobula.learner.policies.adapters import adapter_manifest, quantised_modules
from mobula.learner.policies.pretrained import PRETRAINED
from mobula.learner.policies.quantised import BLOCK
from mobula.learner.policies.shapes import (
    AnyShape,
    ImageShape,
    ModelShape,
    has_config,
    shape_of,
    shape_of_values,
    tiny_shape,
)
from mobula.learner.policies.tiny import TINY

RELEASED_MODELS = Path(__file__).with_name("released_models.yaml")
"""Configurations of released models by name."""
HUB_TIMEOUT_S = 3.0


def policy_shape(config: RunConfig, *, by_name: bool = False) -> AnyShape | None:
    """The shape of `policy.model`, of which the configuration alone is read; None while no model is named, and of
    models that sample image tokens, whose memory is not planned. With `by_name`, a released model that is not on this
    machine is found by its name, without the hub."""
    source = config.policy.model
    if source == MISSING or config.sampler.kind is SamplerKind.IMAGE_TOKENS:
        return None
    if config.policy.tiny != "none" and not (config.sampler.denoises or has_config(source)):
        if config.policy.tiny not in (known := (*TINY, *PRETRAINED)):
            raise PreflightError(f"policy.tiny={config.policy.tiny} is unknown: choose {', '.join(known)} or none")
        return tiny_shape(config.policy.tiny, tie_word_embeddings=config.policy.tiny_tied_embeddings)
    try:
        if config.sampler.denoises:
            from mobula.deploy.planning.images import policy_image_shape

            return policy_image_shape(config)
        if by_name and not Path(source).exists():
            return _shape_by_name(source)
        return shape_of(source)
    except ModuleNotFoundError as error:
        raise PreflightError(
            f"sampler.kind={config.sampler.kind} needs {error.name}: pip install mobula[visual]"
        ) from error
    except (ValueError, OSError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise PreflightError(
            f"policy.model={source} has no config.json that memory can be planned from ({reason}): name a checkpoint "
            "folder, or a hub name that can be reached"
        ) from error


def _shape_by_name(source: str) -> ModelShape:
    """The shape of a checkpoint in the hub's cache, of a model in `released_models.yaml`, or else of one on the hub."""
    try:
        return shape_of(source, is_local=True)
    except (ValueError, OSError):
        released = yaml.safe_load(RELEASED_MODELS.read_text(encoding="utf-8"))
    for name, values in released.items():
        if _plain(name) == _plain(source):
            return shape_of_values(values)
    hub = urlsplit(ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=HUB_TIMEOUT_S).close()
    except OSError as error:
        raise ValueError(
            f"it is not here, the hub cannot be reached, and known names are {', '.join(released)}"
        ) from error
    return shape_of(source)


def _plain(name: str) -> str:
    return re.sub(r"-instruct$|[^a-z0-9.]", "", name.rpartition("/")[2].lower())


MIB = 2**20
TRAINING, SYNC, SAMPLING = "training", "sync", "sampling"
PHASES = (TRAINING, SYNC, SAMPLING)
KV_CACHE, CONTEXT = "kv_cache", "context"  # parts
CUDA_CONTEXT = 600 * MIB  # of one process on one GPU: context, cuBLAS workspaces, NCCL buffers
BLOCK_8BIT = 256  # values of an 8-bit moment that share a scale
CUDA_GRAPHS = 1024 * MIB  # of an engine with enforce_eager=false
GATHERED_BLOCKS = 2  # FSDP2 holds the block that computes and the next one
GATHER_BYTES = 2 * 64 * MIB  # a bucket of whole tensors, flat and in pieces, while weights leave the learner
MAX_WHOLE_GRADIENT_BYTES = 1 << 30  # as in learner/backends/native.py
ZERO_BUCKET = 2 * 500_000_000 * FLOAT32  # DeepSpeed's reduce bucket and its copy, at most all gradients
PROCESS = {  # host memory of a process with its libraries, measured with a model of half a million parameters on CPU
    "learner": 1030 * MIB,
    "vllm": 1220 * MIB,  # rollout engines, and reward workers with an engine of their own
    "torch": 970 * MIB,  # transformers on it: scorers, processor workers, samplers that are no vLLM, reward models
    "plain": 135 * MIB,  # reward functions that compute with neither
}
KEPT_FREE = 576 * MIB  # freed memory that a worker on CPU keeps for its next step: the spawner's settings of malloc
PACKED_COPIES = 2  # of an engine's weights on CPU: packed ones and those of a push (fitted, not counted)
TORCH_REWARDS = ("aesthetic", "clip_score", "pick_score", "reward_model")
ENGINE_REWARDS = ("vllm_judge",)
BYTES_OF = {"nf4": 0.5 + 1.02 / BLOCK, "int8": 1.0}  # of a value, with the scales of a block
USABLE = 0.95  # of a memory: the rest is fragmentation, the driver, other processes
Parts = Mapping[str, int]


@dataclass(frozen=True)
class WorkerMemory:
    """One worker of a role, in bytes: `device[phase][part]` on each of its GPUs (on CPU: in host memory), and
    `host[part]` in host memory. A reward worker takes `gpu_share` of each of its GPUs instead."""

    device: Mapping[str, Parts]
    host: Parts = field(default_factory=dict)
    gpu_share: float = 0.0

    @property
    def peak(self) -> int:
        return max(sum(parts.values()) for parts in self.device.values())

    @property
    def context(self) -> int:
        """Bytes of the process before it computes anything; part of the peak."""
        return max(parts.get(CONTEXT, 0) for parts in self.device.values())

    def in_phase(self, phase: str, gpu_bytes: int | None) -> int:
        """Returns the bytes on a device of `gpu_bytes`; a missing phase counts with the peak."""
        share = int(self.gpu_share * (gpu_bytes or 0))
        return share + (sum(self.device[phase].values()) if phase in self.device else self.peak)

    @property
    def largest(self) -> Parts:
        names = dict.fromkeys(name for parts in self.device.values() for name in parts)
        return {name: max(parts.get(name, 0) for parts in self.device.values()) for name in names}


def worker_memory(config: RunConfig, shape: AnyShape, role: str) -> WorkerMemory:
    kind = role.partition(".")[0]
    match kind:
        case "learner":
            memory = (_adapter_learner if config.sampler.adapters.are_on else _learner)(config, shape)
        case "critic":
            memory = _critic(config.of_critic_ranks, shape)
        case "rollout":
            memory = _engine(config, shape)
        case "reference":
            memory = WorkerMemory(_phases(_reference(config, shape)))
        case "reward":
            memory = WorkerMemory(_phases({}), gpu_share=reward_share(config, role))
        case "processor":
            memory = WorkerMemory(_phases({}), encoders(shape))
        case _:
            memory = WorkerMemory(_phases({}))
    extra = _kept(config, shape, kind) if config.resources.device == "cpu" else {}
    processes = config.resources.rollout.tensor_parallel if kind == "rollout" else 1
    shared = _shared(config) if kind == "learner" else {}
    pushed = _pushed_copy(config, shape, kind) if config.weight_sync.payload == "delta" else {}
    device = {phase: {**parts, **shared.get("cuda", {})} for phase, parts in memory.device.items()}
    if config.resources.device == "cuda" and any(device.values()):
        device = {phase: {**parts, CONTEXT: CUDA_CONTEXT} for phase, parts in device.items()}
    return WorkerMemory(
        device,
        {"process": processes * _process(config, role), **extra, **memory.host, **shared.get("cpu", {}), **pushed},
        memory.gpu_share,
    )


def encoders(shape: AnyShape) -> Parts:
    """Host memory of the networks that encode the prompts of a flow model."""
    return {"encoders": FLOAT32 * shape.num_encoders} if isinstance(shape, ImageShape) else {}


def _kept(config: RunConfig, shape: AnyShape, kind: str) -> dict[str, int]:
    """Host memory that a worker on CPU keeps unused, fitted to the largest processes of runs with 72 M and 135 M
    parameters (docs/measured.md)."""
    if kind not in ("learner", "critic", "rollout", "reference"):
        return {}
    if kind == "reference":
        return {"kept": min(KEPT_FREE, _frozen_weights(config, shape) // 2)}
    is_engine = kind == "rollout" and config.sampler.kind is SamplerKind.VLLM
    weights = DTYPE_BYTES[config.resources.dtype if kind == "rollout" else "float32"] * shape.num_parameters
    return {"kept": min(KEPT_FREE, weights), **({"packed": PACKED_COPIES * weights} if is_engine else {})}


def _shared(config: RunConfig) -> dict[str, Parts]:
    """Returns the memory, by device, from which engines on a learner rank's host read its pushes."""
    resources, sync = config.resources, config.weight_sync
    if sync.same_host == "network" or config.sampler.adapters.are_on:
        return {}
    num_engines = resources.rollout.num_workers
    num_waves = ceil(num_engines / (sync.wave_size or num_engines))
    devices = ["cpu"] if resources.transport == "gloo" else []
    devices += ["cuda"] if resources.device == "cuda" and resources.colocated else []
    return {device: {"shared": num_waves * NUM_CHUNKS * CHUNK_BYTES[device]} for device in devices}


def _pushed_copy(config: RunConfig, shape: AnyShape, kind: str) -> dict[str, int]:
    """Returns the host memory of the pushed weights that changes apply to: in learner ranks that send, each its part,
    and in every rank of a vLLM engine."""
    whole, resources = DTYPE_BYTES[config.resources.dtype] * shape.num_parameters, config.resources
    if kind == "learner":
        return {"pushed": ceil(whole / min(config.weight_sync.max_senders, resources.learner.num_workers))}
    is_engine = kind == "rollout" and config.sampler.kind is SamplerKind.VLLM
    return {"pushed": resources.rollout.tensor_parallel * whole} if is_engine else {}


def _process(config: RunConfig, role: str) -> int:
    kind = role.partition(".")[0]
    if kind == "rollout":
        return PROCESS["vllm" if config.sampler.kind is SamplerKind.VLLM else "torch"]
    if kind == "reward":
        functions = {component.function for component in _components(config, role)}
        if functions.intersection(ENGINE_REWARDS):
            return PROCESS["vllm"]
        return PROCESS["torch" if functions.intersection(TORCH_REWARDS) else "plain"]
    return PROCESS["learner" if kind in ("learner", "critic") else "torch"]


def _components(config: RunConfig, role: str) -> list[RewardComponent]:
    service = role.partition(".")[2] or role
    return [component for component in config.rewards.components if component.service == service]


def reward_share(config: RunConfig, role: str) -> float:
    """Share of each GPU that a reward worker takes: its booking, or more if a judge's engine asks for more.

    A whole GPU has no other worker: its share is all but the reserve of the plan.
    """
    booked = config.resources.roles[role].num_gpus
    if booked == 0:
        return 0.0
    engines = [c.options.get("engine", {}) for c in _components(config, role) if c.function in ENGINE_REWARDS]
    fractions = [engine["gpu_memory_utilization"] for engine in engines if "gpu_memory_utilization" in engine]
    return min(USABLE, max([booked, *fractions]))


def trained_parameters(config: RunConfig, shape: AnyShape) -> list[TensorSpec]:
    """Parameters of the optimizer: adapters, or every weight that `policy.freeze` does not name."""
    own = shape if isinstance(shape, ModelShape) else None
    starts = shape.frozen if isinstance(shape, ImageShape) else shape.family.starts(config.policy.freeze)
    trained = shape.manifest.tensors
    if config.policy.lora.is_on:
        unfrozen = config.policy.model_copy(update={"freeze": ()})  # its names need a checkpoint that is there
        with refusing():
            trained = adapter_manifest(shape.manifest, unfrozen, own).tensors
    return [spec for spec in trained if not spec.name.startswith(starts)]


def _learner(config: RunConfig, shape: AnyShape) -> WorkerMemory:
    batch = Microbatch.of(config, shape, config.learner.sequence_parallel)
    trained = trained_parameters(config, shape)
    num_trained = sum(prod(spec.shape) for spec in trained)
    lora = config.policy.lora.is_on
    num_all = shape.num_parameters + (num_trained if lora else 0)
    num_few, base, working = _quantised(config, shape)
    num_held = shape.num_parameters - num_few
    held = DTYPE_BYTES[config.learner.master_dtype] * num_held + (FLOAT32 * num_trained if lora else 0)
    value = FLOAT32 if lora else DTYPE_BYTES[config.learner.master_dtype]
    weights, gradients, moments = _state(config, shape, batch, trained, held, value)
    activations, offloaded = training_bytes(config, shape, batch)
    training = {
        "weights": weights,
        **base,
        **working,
        "gradients": gradients,
        "optimizer": moments,
        "activations": activations,
        "logits": logits_bytes(config, shape, batch.targets),
    }
    share = num_shards(config) if config.learner.backend != "single" else 1
    moved = ceil(held / share) + sum(base.values())
    if base:  # adapters are a part apart
        base["adapters"] = training["adapters"] = ceil(FLOAT32 * num_trained / share)
        weights = training["weights"] = weights - base["adapters"]
    critic = critic_moments = 0
    if config.algorithm.critic.place == "learner_ranks":  # a copy of the policy, all of it trained, with its own state
        whole = list(shape.manifest.tensors)
        kept, exchanged, critic_moments = _state(config, shape, batch, whole, FLOAT32 * num_all, FLOAT32)
        critic = kept + exchanged
        training["critic"] = critic + critic_moments
    checkpoint = ceil(3 * value * num_trained / share)
    is_copied = config.resources.device == "cuda" or checkpoint <= MAX_COPY_BYTES
    host = {"activations": offloaded, **({"checkpoint": checkpoint} if is_copied else {})}
    if config.training_service.weights == "full":  # the weights that a new model starts with
        host["initial"] = ceil(value * num_trained / share)
    staging = _staging(config, shape) + min(GATHER_BYTES, 2 * FLOAT32 * shape.num_parameters)
    sync = {"weights": weights, **base, "optimizer": moments, "critic": critic + critic_moments, "sync": staging}
    if not config.resources.colocated:
        return WorkerMemory({TRAINING: training, SYNC: sync}, host)
    if config.resources.device == "cuda":
        host["moved"] = moved + moments + critic + critic_moments
    sync.pop("optimizer")  # it is moved before engines wake up
    if config.weight_sync.payload == "adapters" and config.resources.device == "cuda":  # and the policy with it
        sync = {"adapters": FLOAT32 * num_trained, "sync": staging}
    state = {"weights": weights, **base, "optimizer": moments, "critic": critic}
    away = {} if config.resources.device == "cuda" else state
    # An engine that joins late is awake as a whole while the policy comes back for it.
    joining = {"joining": sync} if config.resources.device == "cuda" else {}
    return WorkerMemory({TRAINING: training, SYNC: sync, SAMPLING: away, **joining}, host)


def _quantised(config: RunConfig, shape: AnyShape) -> tuple[int, dict[str, int], dict[str, int]]:
    """Returns the number of values that a rank holds in few bits, their bytes, and those of the largest weight that is
    dequantised for a product: the whole one, and its copy in float32."""
    policy = config.policy
    if policy.quantisation == "none":
        return 0, {}, {}
    assert isinstance(shape, ModelShape), "rules refuse it for models that make images"
    with refusing():
        layers = quantised_modules(shape.manifest, policy, shape)
    sizes = [prod(size) for size in layers.values()]
    working = max(sizes) * (FLOAT32 + DTYPE_BYTES[config.resources.dtype])
    base = {"quantised": ceil(BYTES_OF[policy.quantisation] * sum(sizes))}
    return sum(sizes), base, {"dequantised": working}


def _adapter_learner(config: RunConfig, shape: AnyShape) -> WorkerMemory:
    """Returns the memory of a rank of the training service: the frozen base, and adapters of the highest rank.

    It counts as many adapters as one tenant may have active. Every rank holds all adapters; on a GPU the optimizer
    state of one of them.
    """
    batch = Microbatch.of(config, shape)
    num_few, quantised, working = _quantised(config, shape)
    held = DTYPE_BYTES[config.learner.master_dtype] * (shape.num_parameters - num_few)
    base, _, _ = _state(config, shape, batch, [], held, FLOAT32)
    vocabulary = ("embed", "lm_head")
    matrices = [s for s in _text_matrices(shape) if not any(part in s.name for part in vocabulary)]
    adapter = FLOAT32 * config.sampler.adapters.max_rank * sum(sum(matrix.shape) for matrix in matrices)
    num_adapters = config.training_service.max_models
    is_cuda = config.resources.device == "cuda"
    activations, offloaded = training_bytes(config, shape, batch)
    training = {
        "weights": base + num_adapters * adapter,
        **quantised,
        **working,
        "gradients": 2 * num_adapters * adapter,  # of a call, and of the calls since the last step
        "optimizer": 2 * adapter * (1 if is_cuda else num_adapters),
        "activations": activations,
        "logits": logits_bytes(config, shape, batch.targets),
    }
    host = {"activations": offloaded, **({"optimizer": 2 * num_adapters * adapter} if is_cuda else {})}
    return WorkerMemory(_phases(training), host)


def _text_matrices(shape: AnyShape) -> list[TensorSpec]:
    assert isinstance(shape, ModelShape), "rules refuse it for models that make images"
    towers = shape.family.starts(("vision", "connector"))
    return [s for s in shape.manifest.tensors if len(s.shape) == 2 and not s.name.startswith(towers)]


def _critic(config: RunConfig, shape: AnyShape) -> WorkerMemory:
    lora = config.policy.lora.model_copy(update={"rank": 0})
    whole = config.policy.model_copy(update={"freeze": (), "lora": lora})
    in_float32 = config.learner.model_copy(update={"master_dtype": "float32"})
    learner = _learner(config.model_copy(update={"policy": whole, "learner": in_float32}), shape)
    left_out = ("logits", "sync")
    device = {
        phase: {name: part for name, part in parts.items() if name not in left_out}
        for phase, parts in learner.device.items()
    }
    return WorkerMemory(device, learner.host)


def _state(
    config: RunConfig, shape: AnyShape, batch: Microbatch, trained: list[TensorSpec], held: int, value: int
) -> tuple[int, int, int]:
    """Weights, gradients and optimizer state of one rank, in bytes.

    `held`: bytes of all weights. `value`: bytes of a trained weight, of its gradient, or of one of its moments.
    """
    num_ranks = num_shards(config)
    num_trained = sum(prod(spec.shape) for spec in trained)
    moments = _moments(config, trained) * value // FLOAT32
    compute = DTYPE_BYTES[config.resources.dtype]
    # Autocast keeps copies of weights in float32 until the backward pass.
    has_casts = compute < FLOAT32 and held >= FLOAT32 * shape.num_parameters
    casts = compute * held // FLOAT32 if has_casts else 0
    match config.learner.backend:
        case "single":
            return held + casts, value * num_trained, moments
        case "fsdp2":
            root = shape.num_parameters - shape.num_in_blocks  # gathered while the policy's forward runs
            gathered = (root + GATHERED_BLOCKS * shape.largest_block) * compute if num_ranks > 1 else 0
            kept = min(num_trained, root + GATHERED_BLOCKS * shape.largest_block)
            if FLOAT32 * num_trained <= MAX_WHOLE_GRADIENT_BYTES and step_rows(config) > batch.rows:
                kept = num_trained  # small gradients are exchanged with the last micro-batch only
            gradients = value * num_trained / num_ranks + (FLOAT32 * kept if num_ranks > 1 else 0)
            return ceil(held / num_ranks) + gathered, ceil(gradients), ceil(moments / num_ranks)
        case _:
            sharded = config.learner.zero_stage == 3
            weights = held / (num_ranks if sharded else 1) + casts
            master = FLOAT32 * num_trained / num_ranks
            gradients = FLOAT32 * num_trained / num_ranks + min(ZERO_BUCKET, 2 * FLOAT32 * num_trained)
            return ceil(weights), ceil(gradients), ceil(master + moments / num_ranks)


def num_shards(config: RunConfig) -> int:
    """Learner ranks over which one whole model is sharded."""
    return config.resources.learner.num_workers // config.resources.learner.replicas


def _moments(config: RunConfig, trained: list[TensorSpec]) -> int:
    """AdamW keeps two float32 values a parameter, in 8 bits two bytes; Muon one value for matrices between layers."""
    if config.learner.optimizer == "adamw":
        return 2 * FLOAT32 * sum(prod(spec.shape) for spec in trained)
    if config.learner.optimizer == "adamw_8bit":
        return ceil(2 * (1 + FLOAT32 / BLOCK_8BIT) * sum(prod(spec.shape) for spec in trained))
    matrices = [s for s in trained if len(s.shape) == 2 and not any(part in s.name for part in ("embed", "lm_head"))]
    return FLOAT32 * (2 * sum(prod(s.shape) for s in trained) - sum(prod(s.shape) for s in matrices))


def _engine(config: RunConfig, shape: AnyShape) -> WorkerMemory:
    """On each of its GPUs: a part of the weights, adapters, and a KV cache of `sampler.vllm.kv_cache_bytes`."""
    value, is_cuda = DTYPE_BYTES[config.resources.dtype], config.resources.device == "cuda"
    whole = value * shape.num_parameters
    if isinstance(shape, ImageShape):
        weights = whole + value * shape.num_others
        num_images = config.sampler.flow.batch_size or config.algorithm.samples_per_prompt
        awake = {"weights": weights, "activations": num_images * max(shape.sampled, shape.decoded)}
    else:
        weights = ceil(whole / config.resources.rollout.tensor_parallel) + _adapter_slots(config, shape)
        awake = {"weights": weights, KV_CACHE: _kv_cache(config, shape), "activations": engine_bytes(config, shape)}
        if is_cuda and not config.sampler.vllm.enforce_eager:
            awake["graphs"] = CUDA_GRAPHS
    is_pushed = not config.sampler.adapters.are_on
    buckets = (
        is_pushed * min(config.weight_sync.max_senders, config.resources.learner.num_workers) * _staging(config, shape)
    )
    sync = {**awake, "sync": buckets}
    if not (config.resources.colocated and is_cuda):
        return WorkerMemory({TRAINING: awake, SYNC: sync, SAMPLING: awake})
    graphs = {"graphs": awake["graphs"]} if "graphs" in awake else {}
    waking = {"weights": weights, "sync": buckets, **graphs}
    host = {"moved": whole} if config.resources.sleep_level == 1 else {}
    return WorkerMemory({TRAINING: graphs, SYNC: waking, SAMPLING: awake}, host)


def _adapter_slots(config: RunConfig, shape: ModelShape) -> int:
    """Returns the bytes that vLLM reserves for adapters of matrices outside the vision tower, without a split."""
    adapters = config.sampler.adapters
    values = adapters.max_rank * sum(sum(matrix.shape) for matrix in _text_matrices(shape))
    return min(adapters.max_in_batch, adapters.max_served) * DTYPE_BYTES[config.resources.dtype] * values


def _kv_cache(config: RunConfig, shape: ModelShape) -> int:
    if config.sampler.kind is SamplerKind.VLLM:
        return config.sampler.vllm.kv_cache_bytes
    layers = shape.cache.num_full + shape.cache.num_windowed
    token = layers * shape.cache.width * DTYPE_BYTES[config.resources.dtype]
    return config.algorithm.samples_per_prompt * config.sampler.max_model_len * token


def _reference(config: RunConfig, shape: AnyShape) -> dict[str, int]:
    assert isinstance(shape, ModelShape), "rules refuse it for models that make images"
    batch = Microbatch.of(config, shape)
    num_policies = 1 + len(config.algorithm.distillation.teachers)  # of about the size of the policy
    value = DTYPE_BYTES[config.resources.dtype]
    # A forward pass without gradients holds one block at a time.
    towers = [(shape.text, batch.tokens)] + ([] if shape.vision is None else [(shape.vision, batch.patches)])
    widest = max(tokens * (3 * t.hidden + t.attention_width + 3 * t.intermediate) * value for t, tokens in towers)
    return {
        "weights": num_policies * _frozen_weights(config, shape),
        "activations": widest + batch.patches * shape.pixels_per_patch * PATCH_CHANNELS * FLOAT32,
        "logits": logits_bytes(config, shape, batch.targets),
    }


def _frozen_weights(config: RunConfig, shape: AnyShape) -> int:
    """Of the reference; in 8 or 4 bits its matrices, but not those of the vocabulary (scales are a hundredth of it)."""
    value, kind = DTYPE_BYTES[config.resources.dtype], config.reference.scorers.quantisation
    if kind == "none":
        return value * shape.num_parameters
    specs = shape.manifest.tensors
    small = [s for s in specs if len(s.shape) == 2 and not any(part in s.name for part in ("embed", "lm_head"))]
    num_small = sum(prod(spec.shape) for spec in small)
    return ceil(value * (shape.num_parameters - num_small) + {"int8": 1.0, "int4": 0.5}[kind] * num_small)


def _staging(config: RunConfig, shape: AnyShape) -> int:
    """Returns the bytes of one bucket: `weight_sync.bucket_bytes`, or the largest tensor if it is larger; at most all
    that is pushed."""
    value, largest, num_values = DTYPE_BYTES[config.resources.dtype], shape.largest_tensor, shape.num_parameters
    if config.weight_sync.payload == "adapters" and config.policy.lora.is_on:
        sizes = [prod(spec.shape) for spec in trained_parameters(config, shape)]
        value, largest, num_values = FLOAT32, max(sizes), sum(sizes)
    return min(max(config.weight_sync.bucket_bytes, value * largest), value * num_values)


def _phases(parts: Parts) -> dict[str, Parts]:
    return dict.fromkeys(PHASES, parts)
