"""Rules of learner and warm start."""

from __future__ import annotations

from mobula.configs.schema.run import RunConfig


def _turns_move_the_learner(config: RunConfig) -> str | None:
    if not config.resources.colocated or config.learner.backend != "deepspeed":
        return None
    return (
        "resources.colocated=true moves the learner to host memory and back, which learner.backend=deepspeed does not "
        "do: use learner=fsdp2, or a preset with devices for both"
    )


def _single_learner_is_one(config: RunConfig) -> str | None:
    several = [role for role in config.algorithm.training_roles if config.resources.roles[role].num_workers != 1]
    if config.learner.backend != "single" or not several:
        return None
    key = f"resources.{several[0]}.num_workers"
    return (
        f"learner.backend=single trains in one process but {key}={config.resources.roles[several[0]].num_workers}: "
        f"use learner=fsdp2, or set {key}=1"
    )


def _replicas_divide_the_ranks(config: RunConfig) -> str | None:
    learner = config.resources.learner
    if learner.replicas == 1:
        return None
    if config.learner.backend != "fsdp2":
        return (
            f"resources.learner.replicas={learner.replicas} but learner.backend={config.learner.backend} has one group "
            "of ranks: set learner=fsdp2 or resources.learner.replicas=1"
        )
    if learner.num_workers % learner.replicas == 0:
        return None
    return (
        f"resources.learner.replicas={learner.replicas} does not divide resources.learner.num_workers="
        f"{learner.num_workers}: choose a number of ranks that is a multiple of it"
    )


def _rows_can_be_split(config: RunConfig) -> str | None:
    num_sharing = config.learner.sequence_parallel
    if num_sharing == 1:
        return None
    key = f"learner.sequence_parallel={num_sharing}"
    if config.learner.backend != "fsdp2":
        return f"{key} but learner.backend={config.learner.backend}: use learner=fsdp2, or set it to 1"
    if config.sampler.is_flow or config.sampler.draws_tokens:
        return (
            f"{key} splits the tokens of a text, and sampler.kind={config.sampler.kind} trains images: set "
            "learner.sequence_parallel=1"
        )
    if config.policy.attention != "sdpa":
        return f"{key} exchanges heads in sdpa alone, and policy.attention={config.policy.attention}: set it to sdpa"
    for role in config.algorithm.training_roles:
        replicas = config.resources.learner.replicas if role == "learner" else 1
        num_ranks = config.resources.roles[role].num_workers // replicas
        if num_ranks % num_sharing > 0:
            return (
                f"{key} does not divide the {num_ranks} ranks of resources.{role} that hold one model: choose "
                f"resources.{role}.num_workers as a multiple of {num_sharing * replicas}"
            )
    return None


def _activations_have_a_host_apart(config: RunConfig) -> str | None:
    if config.learner.activation_checkpointing != "blocks_offloaded" or config.resources.device == "cuda":
        return None
    return (
        f"learner.activation_checkpointing=blocks_offloaded moves activations to host memory but resources.device="
        f"{config.resources.device}, where they are already: set learner.activation_checkpointing=blocks"
    )


def _offload_has_a_host_apart(config: RunConfig) -> str | None:
    offload, resources = config.learner.offload, config.resources
    if offload == "none":
        return None
    key = f"learner.offload={offload}"
    if resources.device != "cuda":
        return (
            f"{key} moves state to host memory but resources.device={resources.device}, where it is already: "
            "set learner.offload=none"
        )
    if resources.colocated:
        return (
            f"{key} keeps state in host memory and resources.colocated=true moves all of it there and back between "
            "turns: set learner.offload=none, or a preset with devices for both"
        )
    return None


def _backend_can_offload(config: RunConfig) -> str | None:
    learner = config.learner
    if learner.offload == "none":
        return None
    key = f"learner.offload={learner.offload}"
    match learner.backend:
        case "single":
            return f"{key} is not done by learner.backend=single: use learner=fsdp2 or learner=deepspeed"
        case "fsdp2" if learner.offload == "optimizer":
            return (
                f"{key}: FSDP2 offloads parameters, gradients and optimizer state together: set "
                "learner.offload=parameters or none"
            )
        case "deepspeed" if learner.offload == "parameters" and learner.zero_stage != 3:
            return (
                f"{key} needs sharded parameters but learner.zero_stage={learner.zero_stage}: set learner.zero_stage=3 "
                "or learner.offload=optimizer"
            )
    return None


def _attention_keeps_rows_apart(config: RunConfig) -> str | None:
    if config.learner.packing is not True or config.policy.attention != "eager":
        return None
    return (
        "learner.packing=true keeps rows apart in every attention but policy.attention=eager: set "
        "policy.attention=sdpa or learner.packing=false"
    )


def _warm_start_has_a_target(config: RunConfig) -> str | None:
    if config.warm_start.num_steps == 0 or config.warm_start.target_accuracy > 0:
        return None
    return (
        f"warm_start.target_accuracy=0 is reached before the first of warm_start.num_steps="
        f"{config.warm_start.num_steps}: use warm_start=none, or set a target above 0"
    )


def _optimizer_fits_the_backend(config: RunConfig) -> str | None:
    chosen = {"learner.optimizer": config.learner.optimizer}
    if config.algorithm.critic.is_on:
        chosen["algorithm.critic.optimizer"] = config.algorithm.critic.optimizer
    unsupported = next((key for key, optimizer in chosen.items() if optimizer != "adamw"), None)
    if config.learner.backend != "deepspeed" or unsupported is None:
        return None
    why = {
        "muon": "reads matrices, and learner.backend=deepspeed flattens them",
        "adamw_8bit": "quantises moments in blocks, and learner.backend=deepspeed takes them apart at other places",
    }
    optimizer = chosen[unsupported]
    return f"{unsupported}={optimizer} {why[optimizer]}: use learner=fsdp2, or set {unsupported}=adamw"


def _weights_can_be_bfloat16(config: RunConfig) -> str | None:
    learner = config.learner
    if learner.master_dtype == "float32":
        return None
    needed = {
        "learner.backend": (learner.backend, ("fsdp2", "single")),
        "learner.optimizer": (learner.optimizer, ("adamw",)),
        "learner.ema_decay": (learner.ema_decay, (0.0,)),
        "resources.dtype": (config.resources.dtype, ("bfloat16",)),
        "sampler.kind": (config.sampler.kind, ("vllm", "huggingface")),
    }
    for key, (value, choices) in needed.items():
        if value not in choices:
            return (
                f"learner.master_dtype=bfloat16 is trained with {key}={' or '.join(map(str, choices))} alone, got "
                f"{value}: set it so, or learner.master_dtype=float32"
            )
    return None


RULES = (
    _turns_move_the_learner,
    _single_learner_is_one,
    _replicas_divide_the_ranks,
    _rows_can_be_split,
    _activations_have_a_host_apart,
    _offload_has_a_host_apart,
    _backend_can_offload,
    _attention_keeps_rows_apart,
    _warm_start_has_a_target,
    _optimizer_fits_the_backend,
    _weights_can_be_bfloat16,
)
