"""Rules of learner and rollouts."""

from __future__ import annotations

from mobula.configs.rules.row import Rule, RuleRow
from mobula.configs.schema.rollout import SamplerKind
from mobula.configs.schema.run import RunConfig


def _single_learner_is_one(config: RunConfig) -> str | None:
    several = [role for role in config.algorithm.training_roles if config.resources.roles[role].num_workers != 1]
    if config.learner.backend != "single" or not several:
        return None
    key = f"resources.{several[0]}.num_workers"
    return (
        f"learner.backend=single trains in one process but {key}={config.resources.roles[several[0]].num_workers}: "
        f"use learner=fsdp2, or set {key}=1"
    )


def _rows_can_be_split(config: RunConfig) -> str | None:
    num_sharing = config.learner.sequence_parallel
    if num_sharing == 1:
        return None
    key = f"learner.sequence_parallel={num_sharing}"
    if config.learner.backend != "fsdp2":
        return f"{key} but learner.backend={config.learner.backend}: use learner=fsdp2, or set it to 1"
    if config.sampler.makes_images:
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
        # Adapters are float32 with any dtype of the base.
        "learner.optimizer": (learner.optimizer, ("adamw", "adamw_8bit") if config.policy.lora.is_on else ("adamw",)),
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


LEARNER_RULES: tuple[Rule, ...] = (
    RuleRow(
        lambda c: c.resources.colocated and c.learner.backend == "deepspeed",
        "resources.colocated=true moves the learner to host memory and back, which learner.backend=deepspeed does "
        "not do: use learner=fsdp2, or a preset with devices for both",
    ),
    _single_learner_is_one,
    RuleRow(
        lambda c: c.resources.learner.replicas != 1 and c.learner.backend != "fsdp2",
        "resources.learner.replicas={resources.learner.replicas} but learner.backend={learner.backend} has one group "
        "of ranks: set learner=fsdp2 or resources.learner.replicas=1",
    ),
    RuleRow(
        lambda c: c.learner.backend == "fsdp2" and c.resources.learner.num_workers % c.resources.learner.replicas != 0,
        "resources.learner.replicas={resources.learner.replicas} does not divide resources.learner.num_workers="
        "{resources.learner.num_workers}: choose a number of ranks that is a multiple of it",
    ),
    _rows_can_be_split,
    RuleRow(
        lambda c: c.learner.activation_checkpointing == "blocks_offloaded" and c.resources.device != "cuda",
        "learner.activation_checkpointing=blocks_offloaded moves activations to host memory but resources.device="
        "{resources.device}, where they are already: set learner.activation_checkpointing=blocks",
    ),
    _offload_has_a_host_apart,
    _backend_can_offload,
    RuleRow(
        lambda c: c.learner.packing is True and c.policy.attention == "eager",
        "learner.packing=true keeps rows apart in every attention but policy.attention=eager: set "
        "policy.attention=sdpa or learner.packing=false",
    ),
    RuleRow(
        lambda c: c.warm_start.num_steps != 0 and c.warm_start.target_accuracy <= 0,
        "warm_start.target_accuracy=0 is reached before the first of warm_start.num_steps={warm_start.num_steps}: "
        "use warm_start=none, or set a target above 0",
    ),
    _optimizer_fits_the_backend,
    _weights_can_be_bfloat16,
)


def _lengths_fit(config: RunConfig) -> str | None:
    longest = config.data.max_prompt_tokens + config.sampler.max_tokens
    if longest <= config.sampler.max_model_len:
        return None
    return (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + sampler.max_tokens={config.sampler.max_tokens} "
        f"= {longest} is more than sampler.max_model_len={config.sampler.max_model_len}: "
        f"set sampler.max_model_len={longest} or lower one of the two"
    )


def _engine_reports_what_it_keeps(config: RunConfig) -> str | None:
    sampler = config.sampler
    if sampler.kind is not SamplerKind.VLLM or not sampler.is_cut or sampler.top_k > 0:
        return None
    key = f"sampler.top_p={sampler.top_p:g}" if sampler.top_p < 1 else f"sampler.min_p={sampler.min_p:g}"
    return (
        f"{key} cuts the distribution, and sampler.kind=vllm reports the tokens that it keeps only where their number "
        "has a bound: set sampler.top_k=64 beside it, or use sampler=huggingface"
    )


def _engine_sizes_follow_from_a_gpu(config: RunConfig) -> str | None:
    sampler, device = config.sampler, config.resources.device
    if device == "cuda" or sampler.kind is not SamplerKind.VLLM:
        return None
    for key, value in (("kv_cache_bytes", 268435456), ("max_num_seqs", 64)):
        if getattr(sampler.vllm, key) == 0:
            return (
                f"sampler.vllm.{key}=0 follows from the memory of a GPU, and resources.device={device}: set "
                f"sampler.vllm.{key}={value} or another number"
            )
    return None


def _media_have_an_engine(config: RunConfig) -> str | None:
    sampler = config.sampler
    for noun, number in (("videos", sampler.max_videos_per_prompt), ("audios", sampler.max_audios_per_prompt)):
        if number > 0 and sampler.kind is not SamplerKind.VLLM:
            return (
                f"sampler.kind={sampler.kind} samples no prompts with {noun}, and sampler.max_{noun}_per_prompt="
                f"{number} asks for them: use sampler=vllm, or set it to 0"
            )
    return None


def _reference_has_a_scorer(config: RunConfig) -> str | None:
    if not config.needs_reference or config.resources.reference.num_workers > 0:
        return None
    if config.algorithm.distillation.is_on:
        return (
            f"algorithm.distillation.teacher={config.algorithm.distillation.teacher} is served by reference scorers "
            "but resources.reference.num_workers=0: set resources.reference.num_workers=1, or leave the teacher out"
        )
    if config.offline.job in ("dpo", "kto"):
        return (
            f"offline.job={config.offline.job} compares with the initial policy, which reference scorers serve, but "
            "resources.reference.num_workers=0: set resources.reference.num_workers=1, or with policy.lora "
            "reference.place=learner_ranks"
        )
    return (
        f"algorithm.kl.coef={config.algorithm.kl.coef:g} needs reference log-probs but "
        "resources.reference.num_workers=0: set resources.reference.num_workers=1, or algorithm.kl.coef=0, or with "
        "policy.lora reference.place=learner_ranks, where the learner's sharded weights are the reference"
    )


def _the_learner_is_its_own_reference(config: RunConfig) -> str | None:
    """With `reference.place=learner_ranks`, the policy with adapters off must equal the initial policy."""
    if config.reference.place == "scorers":
        return None
    algorithm, sampler, job = config.algorithm, config.sampler, config.offline.job
    reads = algorithm.kl.coef > 0 or job in ("dpo", "kto")
    needed = {
        "policy.lora.rank above 0, since there are no adapters to turn off": config.policy.lora.is_on,
        "warm_start=none, since one would teach the adapters": config.warm_start.num_steps == 0,
        "algorithm.kl.coef above 0 or offline.job=dpo or kto, since nothing reads a reference": reads,
        "algorithm.distillation.coef=0, since a teacher is another model": not algorithm.distillation.is_on,
        "algorithm.critic.place other than own_ranks, which have no policy": not algorithm.critic.has_own_ranks,
        "sampler.kind other than flow and image_patches, whose models are compared without one": not sampler.denoises,
    }
    missing = [what for what, is_there in needed.items() if not is_there]
    if not missing:
        return None
    return f"reference.place=learner_ranks needs {'; and '.join(missing)}: set these, or reference.place=scorers"


ROLLOUT_RULES: tuple[Rule, ...] = (
    _lengths_fit,
    RuleRow(
        lambda c: c.sampler.vllm.max_num_batched_tokens < c.sampler.vllm.max_num_seqs,
        "sampler.vllm.max_num_batched_tokens={sampler.vllm.max_num_batched_tokens} is less than "
        "sampler.vllm.max_num_seqs={sampler.vllm.max_num_seqs}: each sequence takes a token a step, so set "
        "sampler.vllm.max_num_batched_tokens to {sampler.vllm.max_num_seqs} or more",
    ),
    _engine_reports_what_it_keeps,
    _engine_sizes_follow_from_a_gpu,
    RuleRow(
        lambda c: "" in c.sampler.stop_strings,
        "sampler.stop_strings holds an empty text, which every response contains: leave it out, or name a text such "
        "as </answer>",
    ),
    _media_have_an_engine,
    RuleRow(
        lambda c: c.sampler.adapters.are_on and c.sampler.kind not in (SamplerKind.VLLM, SamplerKind.HUGGINGFACE),
        "sampler.kind={sampler.kind} serves no adapters, and sampler.adapters.max_served="
        "{sampler.adapters.max_served} asks for them: use sampler=vllm or sampler=huggingface, or set it to 0",
    ),
    RuleRow(
        lambda c: c.policy.lora.is_on and not c.policy.lora.target_modules,
        "policy.lora.rank={policy.lora.rank} but policy.lora.target_modules is empty, so nothing would be trained: "
        "name layers or a part, e.g. policy.lora.target_modules=[language]",
    ),
    RuleRow(
        lambda c: (
            c.policy.quantisation != "none"
            and not c.sampler.adapters.are_on  # of the training service
            and (not c.policy.lora.is_on or c.weight_sync.payload != "adapters")
        ),
        "policy.quantisation={policy.quantisation} freezes the base, and policy.lora.rank={policy.lora.rank}, "
        "weight_sync.payload={weight_sync.payload}: set policy.lora.rank to 8 or more and weight_sync.payload=adapters",
    ),
    RuleRow(
        lambda c: c.policy.quantisation != "none" and (c.learner.backend == "deepspeed" or c.sampler.makes_images),
        "policy.quantisation={policy.quantisation} is of token models with learner.backend=single or fsdp2, got "
        "learner.backend={learner.backend} and sampler.kind={sampler.kind}: change them, or leave it out",
    ),
    RuleRow(
        lambda c: (
            c.policy.attention.startswith("flash") and (c.resources.device, c.resources.dtype) != ("cuda", "bfloat16")
        ),
        "policy.attention={policy.attention} needs resources.device=cuda and resources.dtype=bfloat16, got "
        "{resources.device} and {resources.dtype}: set policy.attention=sdpa",
    ),
    _reference_has_a_scorer,
    RuleRow(
        lambda c: c.reference.scorers.quantisation != "none" and not c.needs_reference,
        "reference.scorers.quantisation={reference.scorers.quantisation} but nothing reads a reference: set "
        "algorithm.kl.coef above 0, or reference.scorers.quantisation=none",
    ),
    RuleRow(
        lambda c: (
            c.reference.scorers.quantisation == "int4"
            and c.needs_reference
            and (c.resources.device, c.resources.dtype) != ("cuda", "bfloat16")
        ),
        "reference.scorers.quantisation=int4 runs with resources.device=cuda and resources.dtype=bfloat16 alone, got "
        "{resources.device} and {resources.dtype}: set reference.scorers.quantisation=int8, or use a GPU preset",
    ),
    _the_learner_is_its_own_reference,
)
