"""Rules on which the sections of a run's configuration must agree, one function each.

A rule returns what is wrong, with the value got and the next action, or None. All rules are asked, so that a user
reads every contradiction at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mobula.configs.schema.algorithm_agreement import ALGORITHM_RULES
from mobula.configs.schema.data import DataKind, data_contradictions
from mobula.configs.schema.flow_agreement import FLOW_RULES, IMAGE_TOKEN_RULES
from mobula.configs.schema.offline_agreement import OFFLINE_RULES
from mobula.configs.schema.resources import REWARD_SERVICE
from mobula.configs.schema.rewards import SHARED_SERVICE, reward_contradictions
from mobula.configs.schema.rollout import SamplerKind

if TYPE_CHECKING:
    from mobula.configs.schema.run import RunConfig

Rule = Callable[["RunConfig"], str | None]

LATEST = "latest"  # in the folder of the runs
COMPUTING_ROLES = ("rollout", "learner", "reference")
TRANSPORT_ROLES = ("rollout", "learner")
MOST_PICTURES = {  # a prompt; of other tasks, 1
    DataKind.DIGIT_SUM: 2,
    DataKind.DIGIT_SUM_PAIRS: 2,
    DataKind.DIGIT_LIST: 12,
    DataKind.NLVR2: 2,
}


def contradictions(config: RunConfig) -> tuple[str, ...]:
    """Every contradiction between sections of `config`, in the order of the rules, and those within data and reward."""
    found = (rule(config) for rule in (*RULES, *ALGORITHM_RULES, *OFFLINE_RULES, *FLOW_RULES, *IMAGE_TOKEN_RULES))
    within = (*data_contradictions(config.data), *reward_contradictions(config.rewards))
    return (*(message for message in found if message is not None), *within)


def _minibatches_hold_groups(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.num_minibatches <= algorithm.prompts_per_step:
        return None
    return (
        f"algorithm.num_minibatches={algorithm.num_minibatches} is more than "
        f"algorithm.prompts_per_step={algorithm.prompts_per_step}: a minibatch holds at least one group, "
        "so lower algorithm.num_minibatches or raise algorithm.prompts_per_step"
    )


def _the_link_has_another_name(config: RunConfig) -> str | None:
    if config.name != LATEST:
        return None
    return f"name={LATEST} is the link to the newest run in {config.folder}: give another name"


def _dropout_and_the_gap(config: RunConfig) -> str | None:
    if not config.policy.dropout or config.offline.is_on or config.supervision.on_logprob_gap == "warn":
        return None
    return (
        "policy.dropout=true makes the learner's log-probs other ones than were sampled, and "
        "supervision.on_logprob_gap=stop ends a run for that: set policy.dropout=false, or "
        "supervision.on_logprob_gap=warn"
    )


def _stragglers_can_be_overtaken(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.stragglers == "wait" or algorithm.max_staleness > 0:
        return None
    return (
        "algorithm.stragglers=overtake needs groups beyond those of the step, and algorithm.max_staleness=0 admits "
        "none: set algorithm.max_staleness=1 or more, or algorithm.stragglers=wait"
    )


def _limits_of_concurrency_are_in_order(config: RunConfig) -> str | None:
    found, most = config.concurrency, config.algorithm.max_concurrent_groups
    if found.kind == "fixed" or (
        found.min_groups <= found.start_groups <= most and found.calm_kv_usage <= found.high_kv_usage
    ):
        return None
    return (
        f"concurrency.kind=aimd needs min_groups <= start_groups <= algorithm.max_concurrent_groups, got "
        f"{found.min_groups}, {found.start_groups} and {most}, and calm_kv_usage <= high_kv_usage, got "
        f"{found.calm_kv_usage:g} and {found.high_kv_usage:g}: set concurrency.* in this order"
    )


def _an_engine_has_a_gpu_for_each_of_its_ranks(config: RunConfig) -> str | None:
    found = config.resources.rollout
    if found.tensor_parallel == 1:
        return None
    if config.resources.device == "cpu" or config.sampler.kind != "vllm":
        return (
            f"resources.rollout.tensor_parallel={found.tensor_parallel} needs vLLM on GPUs, got sampler.kind="
            f"{config.sampler.kind} and resources.device={config.resources.device}: set it to 1, or choose both"
        )
    if found.num_gpus != found.tensor_parallel:
        return (
            f"resources.rollout.tensor_parallel={found.tensor_parallel} splits an engine over as many GPUs, and "
            f"resources.rollout.num_gpus={found.num_gpus:g}: set resources.rollout.num_gpus={found.tensor_parallel}"
        )
    if config.resources.colocated:
        return (
            f"resources.rollout.tensor_parallel={found.tensor_parallel} books whole GPUs, of which resources.colocated="
            "true has none left for the learner: set resources.colocated=false, or resources.rollout.tensor_parallel=1 "
            "and a share as resources.rollout.num_gpus"
        )
    return None


def _no_address_holds_credentials(config: RunConfig) -> str | None:
    addresses = {"metrics.tracker_address": config.metrics.tracker_address, "tracing.address": config.tracing.address}
    for key, value in addresses.items():
        address = urlsplit(value)
        if "@" in address.netloc:
            return (
                f"{key} has credentials for {address.hostname}, and the configuration is written to the run folder: "
                "give the address alone, and the key in the environment variable of the tracker or exporter"
            )
    return None


def _spans_have_a_place(config: RunConfig) -> str | None:
    found = config.tracing
    if (found.exporter == "otlp") == bool(found.address):
        return None
    return (
        f"tracing.exporter={found.exporter} and tracing.address={found.address!r}: exporter=otlp sends to an address, "
        "and the others have none; set both, or neither"
    )


def _traced_steps_are_made(config: RunConfig) -> str | None:
    named = {"chrome_steps": config.tracing.chrome_steps, "profile_steps": config.tracing.profile_steps}
    for key, steps in named.items():
        if any(not 1 <= step <= config.num_steps for step in steps):
            return f"tracing.{key}={list(steps)} has steps that are not between 1 and num_steps={config.num_steps}"
    return None


def _an_address_is_of_one_tracker(config: RunConfig) -> str | None:
    metrics = config.metrics
    if not metrics.tracker_address or len(metrics.trackers) == 1:
        return None
    return (
        f"metrics.tracker_address={metrics.tracker_address} is the server of one tracker, and metrics.trackers="
        f"{list(metrics.trackers)}: name one, or leave the address empty"
    )


def _backoff_grows(config: RunConfig) -> str | None:
    first, longest = config.supervision.backoff_s, config.supervision.max_backoff_s
    if first <= longest:
        return None
    return (
        f"supervision.backoff_s={first:g} is the pause before a first restart, supervision.max_backoff_s={longest:g} "
        "the longest one: lower the one or raise the other"
    )


def _a_push_ends_before_its_engines_count_as_hung(config: RunConfig) -> str | None:
    """An engine is paused while it waits for a hung one in a push; a shorter deadline would replace both."""
    push, longest = config.weight_sync.timeout_s, config.weight_sync.answer_s
    limits = {
        "supervision.probe_timeout_s": config.supervision.probe_timeout_s,
        "timeouts.rollout_s": config.timeouts.rollout_s,
    }
    short = {key: limit for key, limit in limits.items() if limit <= longest}
    if not short:
        return None
    return (
        f"weight_sync.timeout_s={push:g} lets a push pause an engine for up to {longest:g} s, a quarter more, and "
        f"{' and '.join(f'{key}={limit:g}' for key, limit in short.items())} would replace healthy engines before: "
        f"raise {' and '.join(short)} above {longest:g}, or lower weight_sync.timeout_s below "
        f"{min(short.values()) / longest * push:g}"
    )


def _turns_are_synchronous(config: RunConfig) -> str | None:
    if not config.resources.colocated or config.algorithm.max_staleness == 0:
        return None
    return (
        f"resources.colocated=true lets engines and learner take turns, but algorithm.max_staleness="
        f"{config.algorithm.max_staleness} has them run at the same time: set algorithm.max_staleness=0, or a preset "
        "with devices for both"
    )


def _turns_move_the_learner(config: RunConfig) -> str | None:
    if not config.resources.colocated or config.learner.backend != "deepspeed":
        return None
    return (
        "resources.colocated=true moves the learner to host memory and back, which learner.backend=deepspeed does not "
        "do: use learner=fsdp2, or a preset with devices for both"
    )


def _groups_have_siblings(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.samples_per_prompt > 1 or not algorithm.is_group_relative:
        return None
    return (
        f"algorithm.advantage={algorithm.advantage} compares siblings but "
        f"algorithm.samples_per_prompt={algorithm.samples_per_prompt}: set algorithm.samples_per_prompt to 2 or more, "
        "or algorithm.advantage=reinforce"
    )


def _uniform_groups_can_differ(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.samples_per_prompt > 1 or not algorithm.drop_uniform_groups:
        return None
    return (
        "algorithm.drop_uniform_groups=true rejects every group when algorithm.samples_per_prompt=1, so no step would "
        "ever fill: set algorithm.drop_uniform_groups=false"
    )


def _every_rank_gets_samples(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    role = max(algorithm.training_roles, key=lambda name: config.resources.roles[name].num_workers)
    num_ranks = config.resources.roles[role].num_workers
    samples = algorithm.prompts_per_step // algorithm.num_minibatches * algorithm.samples_per_prompt
    if samples >= num_ranks:
        return None
    return (
        f"a minibatch holds {samples} samples (algorithm.prompts_per_step={algorithm.prompts_per_step} / "
        f"algorithm.num_minibatches={algorithm.num_minibatches} * "
        f"algorithm.samples_per_prompt={algorithm.samples_per_prompt}) but "
        f"resources.{role}.num_workers={num_ranks}: raise algorithm.prompts_per_step or use fewer {role} workers"
    )


def _environment_has_its_data(config: RunConfig) -> str | None:
    environment, kind = config.environment, config.data.kind
    if environment.is_on == (kind is DataKind.ENVIRONMENT) and not (environment.is_on and config.offline.is_on):
        return None
    if environment.is_on:
        return (
            f"environment.name={environment.name} makes the prompts of RL, but data.kind={kind} and offline.job="
            f"{config.offline.job}: set data=environment and offline.job=none, or environment=none"
        )
    return "data.kind=environment needs an environment: set environment=OPTION, or another data.kind"


def _episodes_fit(config: RunConfig) -> str | None:
    environment = config.environment
    if not environment.is_on:
        return None
    longest = config.data.max_prompt_tokens + environment.max_tokens
    if longest > config.sampler.max_model_len:
        return (
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + environment.max_tokens={environment.max_tokens} "
            f"= {longest} is more than sampler.max_model_len={config.sampler.max_model_len}: set "
            f"sampler.max_model_len={longest} or lower one of the two"
        )
    if config.question_suffix:
        return (
            f"data.prompt_suffix={config.data.prompt_suffix!r} is put behind questions, and environment.name="
            f"{environment.name} makes whole prompts: set data.prompt_suffix=''"
        )
    sampler = config.sampler
    if sampler.first_token_temperature > 0 or sampler.stop_strings:
        return (
            f"environment.name={environment.name} samples every turn at one temperature until its end: set "
            "sampler.first_token_temperature=0 sampler.stop_strings=[]"
        )
    return None


def _stages_are_a_curriculum(config: RunConfig) -> str | None:
    curriculum = config.environment.curriculum
    if curriculum.is_on == (len(curriculum.stages) > 1):
        return None
    if curriculum.is_on:
        return (
            f"environment.curriculum.kind={curriculum.kind} has {len(curriculum.stages)} stages to open: give 2 or "
            "more in environment.curriculum.stages, or set environment.curriculum.kind=none"
        )
    return (
        f"environment.curriculum.stages has {len(curriculum.stages)} stages and environment.curriculum.kind=none opens "
        "none: set environment.curriculum.kind=success, or leave the stages out"
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


def _batch_holds_sequences(config: RunConfig) -> str | None:
    sampler = config.sampler
    if sampler.max_num_batched_tokens >= sampler.max_num_seqs:
        return None
    return (
        f"sampler.max_num_batched_tokens={sampler.max_num_batched_tokens} is less than "
        f"sampler.max_num_seqs={sampler.max_num_seqs}: each sequence takes a token a step, "
        f"so set sampler.max_num_batched_tokens to {sampler.max_num_seqs} or more"
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
    sampler = config.sampler
    if config.resources.device == "cuda" or sampler.kind is not SamplerKind.VLLM:
        return None
    for key, value in (("kv_cache_bytes", 268435456), ("max_num_seqs", 64)):
        if getattr(sampler, key) == 0:
            return (
                f"sampler.{key}=0 follows from the memory of a GPU, and resources.device={config.resources.device}: "
                f"set sampler.{key}={value} or another number"
            )
    return None


def _stop_strings_have_a_text(config: RunConfig) -> str | None:
    if "" not in config.sampler.stop_strings:
        return None
    return (
        "sampler.stop_strings holds an empty text, which every response contains: leave it out, or name a text such as "
        "</answer>"
    )


def _pictures_of_the_task_fit(config: RunConfig) -> str | None:
    num_pictures = MOST_PICTURES.get(config.data.kind, 1)
    if config.sampler.max_images_per_prompt >= num_pictures:
        return None
    return (
        f"data.kind={config.data.kind} shows up to {num_pictures} pictures in a prompt but "
        f"sampler.max_images_per_prompt={config.sampler.max_images_per_prompt}: set it to {num_pictures}"
    )


def _videos_of_the_task_fit(config: RunConfig) -> str | None:
    if config.data.kind is not DataKind.DIGIT_CLIPS or config.sampler.max_videos_per_prompt > 0:
        return None
    return (
        f"data.kind={config.data.kind} shows a video in every prompt but sampler.max_videos_per_prompt=0: set it to 1"
    )


def _videos_have_an_engine(config: RunConfig) -> str | None:
    if config.sampler.max_videos_per_prompt == 0 or config.sampler.kind is SamplerKind.VLLM:
        return None
    return (
        f"sampler.kind={config.sampler.kind} samples no prompts with videos, and sampler.max_videos_per_prompt="
        f"{config.sampler.max_videos_per_prompt} asks for them: use sampler=vllm, or set it to 0"
    )


def _sounds_have_an_engine(config: RunConfig) -> str | None:
    if config.sampler.max_audios_per_prompt == 0 or config.sampler.kind is SamplerKind.VLLM:
        return None
    return (
        f"sampler.kind={config.sampler.kind} samples no prompts with sounds, and sampler.max_audios_per_prompt="
        f"{config.sampler.max_audios_per_prompt} asks for them: use sampler=vllm, or set it to 0"
    )


def _pixel_range_is_open(config: RunConfig) -> str | None:
    if config.data.min_pixels <= config.data.max_pixels:
        return None
    return (
        f"data.min_pixels={config.data.min_pixels} is more than data.max_pixels={config.data.max_pixels}: "
        "lower data.min_pixels or raise data.max_pixels"
    )


def _remote_environment_has_a_server(config: RunConfig) -> str | None:
    environment = config.environment
    if not environment.is_on or environment.host != "remote" or environment.url.startswith(("http://", "https://")):
        return None
    return (
        f"environment.host=remote asks a server, and environment.url={environment.url!r} is none: set it to the URL "
        "that `mobula serve-environment` prints"
    )


def _services_have_workers(config: RunConfig) -> str | None:
    own = config.resources.reward_services
    known = [SHARED_SERVICE, *own]
    missing = [name for name in config.rewards.services if name not in known]
    if missing:
        return (
            f"rewards.components use the service {missing[0]}, which has no workers: give "
            f"resources.reward_services.{missing[0]} some, or use one of {', '.join(known)}"
        )
    idle = [name for name in own if name not in config.rewards.services]
    if idle:
        return (
            f"resources.reward_services.{idle[0]} has workers that no component uses: name it as some "
            "rewards.components.INDEX.service, or leave it out"
        )
    return None


def _warm_start_has_a_target(config: RunConfig) -> str | None:
    if config.warm_start.num_steps == 0 or config.warm_start.target_accuracy > 0:
        return None
    return (
        f"warm_start.target_accuracy=0 is reached before the first of warm_start.num_steps="
        f"{config.warm_start.num_steps}: use warm_start=none, or set a target above 0"
    )


def _roles_have_workers(config: RunConfig) -> str | None:
    shared = (SHARED_SERVICE,) if SHARED_SERVICE in config.rewards.services else ()
    needed = (
        "rollout",
        *config.algorithm.training_roles,
        *shared,
        *(f"{REWARD_SERVICE}{name}" for name in config.resources.reward_services),
    )
    empty = [role for role in needed if config.resources.roles[role].num_workers == 0]
    if not empty:
        return None
    keys = ", ".join(f"resources.{role}.num_workers" for role in empty)
    return f"{keys} is 0, and no run works without these roles: set it to 1 or more"


def _reference_has_a_scorer(config: RunConfig) -> str | None:
    if not config.needs_reference or config.resources.reference.num_workers > 0:
        return None
    if config.algorithm.distillation.is_on:
        return (
            f"algorithm.distillation.teacher={config.algorithm.distillation.teacher} is served by reference scorers "
            "but resources.reference.num_workers=0: set resources.reference.num_workers=1, or leave the teacher out"
        )
    if config.offline.job == "dpo":
        return (
            "offline.job=dpo compares with the initial policy, which reference scorers serve, but "
            "resources.reference.num_workers=0: set resources.reference.num_workers=1, or with policy.lora "
            "reference.place=learner_ranks"
        )
    return (
        f"algorithm.kl.coef={config.algorithm.kl.coef:g} needs reference log-probs but "
        "resources.reference.num_workers=0: set resources.reference.num_workers=1, or algorithm.kl.coef=0"
    )


def _reference_can_be_quantised(config: RunConfig) -> str | None:
    kind, resources = config.reference.quantisation, config.resources
    if kind == "none":
        return None
    if not config.needs_reference:
        return (
            f"reference.quantisation={kind} but nothing reads a reference: set algorithm.kl.coef above 0, or "
            "reference.quantisation=none"
        )
    if kind == "int4" and (resources.device, resources.dtype) != ("cuda", "bfloat16"):
        return (
            f"reference.quantisation=int4 runs with resources.device=cuda and resources.dtype=bfloat16 alone, got "
            f"{resources.device} and {resources.dtype}: set reference.quantisation=int8, or use a GPU preset"
        )
    return None


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


def _adapters_can_travel(config: RunConfig) -> str | None:
    if config.weight_sync.payload != "adapters" or config.policy.lora.is_on:
        return None
    return (
        f"weight_sync.payload=adapters but policy.lora.rank={config.policy.lora.rank}, so there are none: "
        "set policy.lora.rank to 8 or more, or weight_sync.payload=weights"
    )


def _slept_weights_come_back(config: RunConfig) -> str | None:
    resources = config.resources
    if not resources.colocated or resources.sleep_level == 1 or config.weight_sync.payload == "weights":
        return None
    return (
        f"resources.sleep_level={resources.sleep_level} discards the weights of a sleeping engine, and a push with "
        "weight_sync.payload=adapters brings only the layers with adapters: set resources.sleep_level=1 or "
        "weight_sync.payload=weights"
    )


def _adapters_have_a_place(config: RunConfig) -> str | None:
    if not config.policy.lora.is_on or config.policy.lora.target_modules:
        return None
    return (
        f"policy.lora.rank={config.policy.lora.rank} but policy.lora.target_modules is empty, so nothing would be "
        "trained: name layers or a part, e.g. policy.lora.target_modules=[language]"
    )


def _nodes_are_counted(config: RunConfig) -> str | None:
    resources = config.resources
    roles = (resources.learner, resources.rollout)
    if all(workers.num_workers % resources.num_nodes == 0 for workers in roles):
        return None
    return (
        f"resources.num_nodes={resources.num_nodes} but resources.learner.num_workers={resources.learner.num_workers} "
        f"and resources.rollout.num_workers={resources.rollout.num_workers}: choose resources=multi_node, which counts "
        "its workers by nodes, or leave resources.num_nodes out"
    )


def _gpus_are_whole_or_shares(config: RunConfig) -> str | None:
    for role, workers in config.resources.roles.items():
        num_gpus = workers.num_gpus
        if num_gpus > 1 and not num_gpus.is_integer():
            return (
                f"resources.{role}.num_gpus={num_gpus:g}: Ray books a share of one GPU or a whole number of them, "
                f"so set resources.{role}.num_gpus={int(num_gpus)} or {int(num_gpus) + 1}"
            )
    return None


def _device_has_its_gpus(config: RunConfig) -> str | None:
    resources = config.resources
    used = COMPUTING_ROLES if config.needs_reference else TRANSPORT_ROLES
    for role in (*used, *(("critic",) if config.algorithm.critic.has_own_ranks else ())):
        num_gpus = resources.roles[role].num_gpus
        if resources.device == "cuda" and num_gpus == 0:
            return (
                f"resources.device=cuda but resources.{role}.num_gpus=0, so {role} would see no GPU: "
                f"set resources.{role}.num_gpus=1 or resources.device=cpu"
            )
        if resources.device == "cpu" and num_gpus > 0:
            return (
                f"resources.device=cpu but resources.{role}.num_gpus={num_gpus:g} would be booked for nothing: "
                f"set resources.{role}.num_gpus=0, or use a GPU preset such as resources=two_gpu"
            )
    return None


def _transport_fits_device(config: RunConfig) -> str | None:
    if config.resources.transport == "nccl" and config.resources.device == "cpu":
        return (
            "resources.transport=nccl moves weights between GPUs but resources.device=cpu: set resources.transport=gloo"
        )
    return None


def _nccl_members_have_their_own_gpu(config: RunConfig) -> str | None:
    if config.resources.transport != "nccl" or config.resources.device != "cuda":
        return None
    for role in TRANSPORT_ROLES:
        num_gpus = config.resources.roles[role].num_gpus
        if 0 < num_gpus <= 0.5:
            return (
                f"resources.{role}.num_gpus={num_gpus:g} lets two members of one NCCL group share a GPU, "
                f"which NCCL refuses: set resources.{role}.num_gpus=1 or resources.transport=gloo"
            )
    return None


def _attention_fits_device(config: RunConfig) -> str | None:
    resources, attention = config.resources, config.policy.attention
    if not attention.startswith("flash") or (resources.device, resources.dtype) == ("cuda", "bfloat16"):
        return None
    return (
        f"policy.attention={attention} needs resources.device=cuda and resources.dtype=bfloat16, got "
        f"{resources.device} and {resources.dtype}: set policy.attention=sdpa"
    )


def _suites_have_names(config: RunConfig) -> str | None:
    unfit = [name for name in config.evaluation.suites if name == "held_out" or not name.replace("_", "").isalnum()]
    if not unfit:
        return None
    return (
        f"evaluation.suites has the name {unfit[0]!r}: use letters, digits and underscores, and another name than "
        "held_out, which is the run's own suite"
    )


def _greedy_suites_have_one_sample(config: RunConfig) -> str | None:
    if config.sampler.is_flow:  # each response begins at other noise
        return None
    if config.evaluation.temperature == 0 and config.evaluation.num_samples > 1:
        return (
            f"evaluation.num_samples={config.evaluation.num_samples} at evaluation.temperature=0, whose responses are "
            "all the same: set evaluation.num_samples=1, or a temperature above 0"
        )
    for name, suite in config.evaluation.suites.items():
        if suite.temperature == 0 and suite.num_samples > 1:
            return (
                f"evaluation.suites.{name} has num_samples={suite.num_samples} at temperature 0, whose responses are "
                "all the same: set num_samples=1, or a temperature above 0"
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
    if not config.learner.packing or config.policy.attention != "eager":
        return None
    return (
        "learner.packing=true keeps rows apart in every attention but policy.attention=eager: set "
        "policy.attention=sdpa or learner.packing=false"
    )


RULES: tuple[Rule, ...] = (
    _the_link_has_another_name,
    _minibatches_hold_groups,
    _dropout_and_the_gap,
    _stragglers_can_be_overtaken,
    _limits_of_concurrency_are_in_order,
    _an_address_is_of_one_tracker,
    _no_address_holds_credentials,
    _spans_have_a_place,
    _traced_steps_are_made,
    _an_engine_has_a_gpu_for_each_of_its_ranks,
    _backoff_grows,
    _a_push_ends_before_its_engines_count_as_hung,
    _turns_are_synchronous,
    _turns_move_the_learner,
    _groups_have_siblings,
    _uniform_groups_can_differ,
    _every_rank_gets_samples,
    _environment_has_its_data,
    _episodes_fit,
    _stages_are_a_curriculum,
    _lengths_fit,
    _batch_holds_sequences,
    _engine_reports_what_it_keeps,
    _engine_sizes_follow_from_a_gpu,
    _stop_strings_have_a_text,
    _pictures_of_the_task_fit,
    _videos_of_the_task_fit,
    _videos_have_an_engine,
    _sounds_have_an_engine,
    _pixel_range_is_open,
    _remote_environment_has_a_server,
    _services_have_workers,
    _warm_start_has_a_target,
    _roles_have_workers,
    _reference_has_a_scorer,
    _reference_can_be_quantised,
    _single_learner_is_one,
    _replicas_divide_the_ranks,
    _adapters_can_travel,
    _slept_weights_come_back,
    _adapters_have_a_place,
    _nodes_are_counted,
    _gpus_are_whole_or_shares,
    _device_has_its_gpus,
    _transport_fits_device,
    _nccl_members_have_their_own_gpu,
    _attention_fits_device,
    _activations_have_a_host_apart,
    _offload_has_a_host_apart,
    _backend_can_offload,
    _attention_keeps_rows_apart,
    _suites_have_names,
    _greedy_suites_have_one_sample,
)
