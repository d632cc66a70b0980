"""Rules of policy, sampler and reference."""

from __future__ import annotations

from mobula.configs.schema.rollout import SamplerKind
from mobula.configs.schema.run import RunConfig


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
    vllm = config.sampler.vllm
    if vllm.max_num_batched_tokens >= vllm.max_num_seqs:
        return None
    return (
        f"sampler.vllm.max_num_batched_tokens={vllm.max_num_batched_tokens} is less than sampler.vllm.max_num_seqs="
        f"{vllm.max_num_seqs}: each sequence takes a token a step, so set sampler.vllm.max_num_batched_tokens to "
        f"{vllm.max_num_seqs} or more"
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


def _stop_strings_have_a_text(config: RunConfig) -> str | None:
    if "" not in config.sampler.stop_strings:
        return None
    return (
        "sampler.stop_strings holds an empty text, which every response contains: leave it out, or name a text such as "
        "</answer>"
    )


def _media_have_an_engine(config: RunConfig) -> str | None:
    sampler = config.sampler
    for noun, number in (("videos", sampler.max_videos_per_prompt), ("audios", sampler.max_audios_per_prompt)):
        if number > 0 and sampler.kind is not SamplerKind.VLLM:
            return (
                f"sampler.kind={sampler.kind} samples no prompts with {noun}, and sampler.max_{noun}_per_prompt="
                f"{number} asks for them: use sampler=vllm, or set it to 0"
            )
    return None


def _served_adapters_have_an_engine(config: RunConfig) -> str | None:
    sampler = config.sampler
    if not sampler.adapters.are_on or sampler.kind in (SamplerKind.VLLM, SamplerKind.HUGGINGFACE):
        return None
    return (
        f"sampler.kind={sampler.kind} serves no adapters, and sampler.adapters.max_served="
        f"{sampler.adapters.max_served} asks for them: use sampler=vllm or sampler=huggingface, or set it to 0"
    )


def _adapters_have_a_place(config: RunConfig) -> str | None:
    if not config.policy.lora.is_on or config.policy.lora.target_modules:
        return None
    return (
        f"policy.lora.rank={config.policy.lora.rank} but policy.lora.target_modules is empty, so nothing would be "
        "trained: name layers or a part, e.g. policy.lora.target_modules=[language]"
    )


def _attention_fits_device(config: RunConfig) -> str | None:
    resources, attention = config.resources, config.policy.attention
    if not attention.startswith("flash") or (resources.device, resources.dtype) == ("cuda", "bfloat16"):
        return None
    return (
        f"policy.attention={attention} needs resources.device=cuda and resources.dtype=bfloat16, got "
        f"{resources.device} and {resources.dtype}: set policy.attention=sdpa"
    )


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
        "resources.reference.num_workers=0: set resources.reference.num_workers=1, or algorithm.kl.coef=0, or with "
        "policy.lora reference.place=learner_ranks, where the learner's sharded weights are the reference"
    )


def _reference_can_be_quantised(config: RunConfig) -> str | None:
    kind, resources = config.reference.scorers.quantisation, config.resources
    if kind == "none":
        return None
    if not config.needs_reference:
        return (
            f"reference.scorers.quantisation={kind} but nothing reads a reference: set algorithm.kl.coef above 0, or "
            "reference.scorers.quantisation=none"
        )
    if kind == "int4" and (resources.device, resources.dtype) != ("cuda", "bfloat16"):
        return (
            "reference.scorers.quantisation=int4 runs with resources.device=cuda and resources.dtype=bfloat16 alone, "
            f"got {resources.device} and {resources.dtype}: set reference.scorers.quantisation=int8, or use a GPU "
            "preset"
        )
    return None


def _the_learner_is_its_own_reference(config: RunConfig) -> str | None:
    """With `reference.place=learner_ranks`, the policy with adapters off must equal the initial policy."""
    if config.reference.place == "scorers":
        return None
    algorithm, sampler, job = config.algorithm, config.sampler, config.offline.job
    reads = algorithm.kl.coef > 0 or job == "dpo"
    needed = {
        "policy.lora.rank above 0, since there are no adapters to turn off": config.policy.lora.is_on,
        "warm_start=none, since one would teach the adapters": config.warm_start.num_steps == 0,
        "algorithm.kl.coef above 0 or offline.job=dpo, since nothing reads a reference": reads,
        "algorithm.distillation.coef=0, since a teacher is another model": not algorithm.distillation.is_on,
        "algorithm.critic.place other than own_ranks, which have no policy": not algorithm.critic.has_own_ranks,
        "sampler.kind other than flow, whose models are compared without one": not sampler.is_flow,
    }
    missing = [what for what, is_there in needed.items() if not is_there]
    if not missing:
        return None
    return f"reference.place=learner_ranks needs {'; and '.join(missing)}: set these, or reference.place=scorers"


RULES = (
    _lengths_fit,
    _batch_holds_sequences,
    _engine_reports_what_it_keeps,
    _engine_sizes_follow_from_a_gpu,
    _stop_strings_have_a_text,
    _media_have_an_engine,
    _served_adapters_have_an_engine,
    _adapters_have_a_place,
    _attention_fits_device,
    _reference_has_a_scorer,
    _reference_can_be_quantised,
    _the_learner_is_its_own_reference,
)
