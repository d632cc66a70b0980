"""Rules of offline jobs and of flow models."""

from __future__ import annotations

from mobula.configs.rules.row import Rule, RuleRow
from mobula.configs.schema.algorithm import PREDICTIVE
from mobula.configs.schema.data import DataKind
from mobula.configs.schema.rollout import first_step
from mobula.configs.schema.run import RunConfig


def _rows_fit_the_job(config: RunConfig) -> str | None:
    job, kind = config.offline.job, config.data.kind
    has_chat = DataKind.CHAT in (kind, *(s.kind for s in config.data.mixture.sources.values()))
    if config.offline.is_on == (kind is DataKind.CHAT) == has_chat:
        return None
    if config.offline.is_on:
        return (
            f"offline.job={job} trains on conversations, and data.kind={kind} holds questions: set data=chat and "
            "data.path=FOLDER; docs/offline_training.md has the form of the rows"
        )
    return (
        f"data.kind={kind} holds conversations, which offline jobs train on: use `mobula sft`, `mobula "
        "reward-model`, `mobula dpo` or `mobula kto`, or another data.kind"
    )


def _rows_replace_rollouts(config: RunConfig) -> str | None:
    if not config.offline.is_on:
        return None
    wanted = {
        "algorithm.kl.coef": (config.algorithm.kl.coef, 0),
        "algorithm.distillation.coef": (config.algorithm.distillation.coef, 0),
        "algorithm.num_epochs": (config.algorithm.num_epochs, 1),
        "algorithm.num_minibatches": (config.algorithm.num_minibatches, 1),
        "algorithm.critic.place": (config.algorithm.critic.place, "none"),
        "data.curriculum.kind": (config.data.curriculum.kind, "none"),
        "warm_start.num_steps": (config.warm_start.num_steps, 0),
        "replay.journal": (config.replay.journal, False),
        "replay.trajectory_log": (config.replay.trajectory_log, False),
        "resources.colocated": (config.resources.colocated, False),
        "sampler.temperature": (config.sampler.temperature, 1),
    }
    unfit = {key: (value, fit) for key, (value, fit) in wanted.items() if value != fit}
    if not unfit:
        return None
    named = ", ".join(f"{key}={_shown(value)}" for key, (value, _) in unfit.items())
    fixed = ", ".join(f"{key}={_shown(fit)}" for key, (_, fit) in unfit.items())
    return f"offline.job={config.offline.job} trains on rows, one optimizer step a step, got {named}: set {fixed}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | str) else f"{value:g}"


OFFLINE_RULES: tuple[Rule, ...] = (
    _rows_fit_the_job,
    RuleRow(
        lambda c: c.offline.is_on and c.question_suffix != "",
        "data.prompt_suffix={data.prompt_suffix!r} is put behind questions, and rows of offline.job={offline.job} "
        "are whole conversations: set data.prompt_suffix=''",
    ),
    _rows_replace_rollouts,
    RuleRow(
        lambda c: (
            c.offline.is_on and c.offline.batch_size < c.resources.learner.num_workers // c.learner.sequence_parallel
        ),
        "offline.batch_size={offline.batch_size} leaves some of resources.learner.num_workers="
        "{resources.learner.num_workers} ranks without a row: raise offline.batch_size or use fewer learner workers",
    ),
    RuleRow(
        lambda c: c.offline.job == "dpo" and c.offline.dpo.loss != "sigmoid" and c.offline.dpo.label_smoothing != 0,
        "offline.dpo.label_smoothing={offline.dpo.label_smoothing:g} is a part of the logistic loss, and "
        "offline.dpo.loss={offline.dpo.loss} has none: set offline.dpo.label_smoothing=0, or offline.dpo.loss=sigmoid",
    ),
    RuleRow(
        lambda c: (
            c.offline.job == "reward_model"
            and c.offline.reward_model.loss != "bradley_terry"
            and c.offline.reward_model.margin != 0
        ),
        "offline.reward_model.margin={offline.reward_model.margin:g} is between scores of a pair, and "
        "offline.reward_model.loss={offline.reward_model.loss} has no pairs: set offline.reward_model.margin=0, or "
        "offline.reward_model.loss=bradley_terry",
    ),
)


def _adapters_are_named(config: RunConfig) -> str | None:
    lora = config.policy.lora
    if not config.sampler.is_flow or not lora.is_on or "language" not in lora.target_modules:
        return None
    return (
        f"policy.lora.target_modules={list(lora.target_modules)} names the decoder of a token model, and policy.model="
        f"{config.policy.model} is a flow model: name its layers, e.g. "
        "policy.lora.target_modules=[to_q,to_k,to_v,to_out.0]"
    )


def _window_lies_in_the_schedule(config: RunConfig) -> str | None:
    flow = config.sampler.flow
    last = flow.num_steps - 1 if flow.kernel == "cps" else flow.num_steps  # the last step of cps adds no noise
    first = first_step(flow.num_steps, flow.strength)
    if not config.sampler.denoises or first <= flow.window_start < flow.window_end <= last:
        return None
    return (
        f"sampler.flow.window_start={flow.window_start} and sampler.flow.window_end={flow.window_end} are not the "
        f"bounds of steps from {first} to {last} of {flow.num_steps}: set {first} <= window_start < window_end <= "
        f"{last}"
    )


def _window_has_the_last_step(config: RunConfig) -> str | None:
    """A loss on clean images needs the last denoising step, which produces them."""
    flow, algorithm = config.sampler.flow, config.algorithm
    if not config.sampler.is_flow or algorithm.has_likelihood:
        return None
    if flow.window_end != flow.num_steps or flow.window_size > 0:
        return (
            f"algorithm.loss={algorithm.loss} trains on clean images, and sampler.flow.window_end={flow.window_end} "
            f"with window_size={flow.window_size} does not keep them: set sampler.flow.window_start="
            f"{flow.num_steps - 1}, window_end={flow.num_steps} and window_size=0"
        )
    if flow.guidance != 1:
        return (
            f"algorithm.loss={algorithm.loss} trains velocities without guidance, and sampler.flow.guidance="
            f"{flow.guidance:g} samples with it: set sampler.flow.guidance=1"
        )
    return None


def _losses_have_what_they_need(config: RunConfig) -> str | None:
    algorithm, flow = config.algorithm, config.sampler.flow
    if not config.sampler.is_flow and algorithm.loss in PREDICTIVE:
        return (
            f"algorithm.loss={algorithm.loss} is for flow models, and sampler.kind={config.sampler.kind} samples "
            "tokens: set sampler=flow, or algorithm.loss=ppo_clip"
        )
    if not config.sampler.denoises:
        return None
    if flow.kernel == "ddim" and algorithm.has_likelihood and not config.offline.is_on:
        return (
            f"sampler.flow.kernel=ddim samples without a likelihood, which algorithm.loss={algorithm.loss} reads: set "
            "sampler.flow.kernel=flow_grpo, or algorithm.loss=nft"
        )
    if algorithm.loss == "grpo_guard" and algorithm.old_logprobs != "recomputed":
        return (
            f"algorithm.loss=grpo_guard compares means with those of the weights that a step trains from, and "
            f"algorithm.old_logprobs={algorithm.old_logprobs} takes log-probs from elsewhere: set "
            "algorithm.old_logprobs=recomputed"
        )
    if algorithm.loss == "nft" and algorithm.num_epochs > 1:
        return (
            f"algorithm.loss=nft draws the same noise in each of algorithm.num_epochs={algorithm.num_epochs}: set "
            "algorithm.num_epochs=1, and algorithm.losses.nft.num_draws higher"
        )
    return None


def _unused_by_steps(config: RunConfig) -> dict[str, tuple[bool, str]]:
    """Key that denoising steps do not use -> whether it is set, and the value to set."""
    algorithm = config.algorithm
    return {
        "algorithm.entropy.bonus": (algorithm.entropy.bonus > 0, "algorithm.entropy.bonus=0"),
        "algorithm.entropy.top_share": (algorithm.entropy.top_share < 1, "algorithm.entropy.top_share=1"),
        "algorithm.shaping.repetition_penalty": (
            algorithm.shaping.repetition_penalty > 0,
            "algorithm.shaping.repetition_penalty=0",
        ),
        "sampler.temperature": (config.sampler.temperature != 1, "sampler.temperature=1"),
    }


def _nothing_reads_tokens(config: RunConfig) -> str | None:
    if not config.sampler.is_flow:
        return None
    algorithm = config.algorithm
    asked = {
        "algorithm.advantage of a critic": (algorithm.critic.is_on, "algorithm.advantage=grpo"),
        "algorithm.distillation.teacher": (algorithm.distillation.is_on, "no teacher"),
        **_unused_by_steps(config),
        "environment.name": (config.environment.is_on, "environment=none"),
        "offline.job": (config.offline.job not in ("none", "dpo"), "offline.job=none or dpo"),
        "resources.reference.num_workers": (
            config.resources.reference.num_workers > 0,
            "resources.reference.num_workers=0",
        ),
        "learner.activation_checkpointing=blocks_offloaded": (
            config.learner.activation_checkpointing == "blocks_offloaded",
            "learner.activation_checkpointing=blocks",
        ),
    }
    refused = [f"{key} (set {instead})" for key, (is_asked, instead) in asked.items() if is_asked]
    return f"sampler.kind=flow has no use for {', '.join(refused)}" if refused else None


def _nothing_reads_text(config: RunConfig) -> str | None:
    if not config.sampler.draws_tokens:
        return None
    algorithm, sampler = config.algorithm, config.sampler
    asked = {
        "algorithm.advantage of a critic": (algorithm.critic.is_on, "algorithm.advantage=grpo"),
        "algorithm.distillation.teacher": (algorithm.distillation.is_on, "no teacher"),
        "algorithm.kl.coef": (
            algorithm.kl.coef > 0 and not sampler.draws_patches and config.reference.place != "learner_ranks",
            "algorithm.kl.coef=0, or policy.lora.rank above 0 and reference.place=learner_ranks",
        ),
        "resources.reference.num_workers": (
            config.resources.reference.num_workers > 0,
            "resources.reference.num_workers=0",
        ),
        "sampler.top_p, top_k or min_p": (sampler.is_cut, "sampler.top_p=1 sampler.top_k=0 sampler.min_p=0"),
        "sampler.first_token_temperature": (
            sampler.first_token_temperature > 0,
            "sampler.first_token_temperature=0",
        ),
        "sampler.stop_strings": (bool(sampler.stop_strings), "sampler.stop_strings=[]"),
        "warm_start.num_steps": (config.warm_start.num_steps > 0 and not sampler.draws_patches, "warm_start=none"),
        "environment.name": (config.environment.is_on, "environment=none"),
        "offline.job": (config.offline.is_on, "offline.job=none"),
        **(_unused_by_steps(config) if sampler.draws_patches else {}),
        "sampler.flow.num_frames": (
            sampler.draws_patches and sampler.flow.num_frames > 1,
            "sampler.flow.num_frames=1",
        ),
    }
    refused = [f"{key} (set {instead})" for key, (is_asked, instead) in asked.items() if is_asked]
    return f"sampler.kind={sampler.kind} has no use for {', '.join(refused)}" if refused else None


def _vrl_has_its_schedule(config: RunConfig) -> str | None:
    flow, patches = config.sampler.flow, config.sampler.image_patches
    if not config.sampler.denoises or flow.kernel != "vrl":
        return None
    if not config.sampler.draws_patches:
        return (
            f"sampler.flow.kernel=vrl is for continuous tokens, and sampler.kind={config.sampler.kind} denoises whole "
            "images: set sampler.flow.kernel=flow_grpo, or sampler=image_patches"
        )
    num = flow.num_steps
    if (flow.window_start, flow.window_end, patches.shift, patches.last_step) == (num - 1, num, 1, 0):
        return None
    return (
        f"sampler.flow.kernel=vrl adds noise in the last of sampler.flow.num_steps={num} even steps alone: set "
        f"sampler.flow.window_start={num - 1} window_end={num}, and sampler.image_patches.shift=1 last_step=0"
    )


FLOW_RULES: tuple[Rule, ...] = (
    RuleRow(
        lambda c: (
            c.sampler.denoises
            and c.algorithm.kl.coef != 0
            and (not c.policy.lora.is_on or c.algorithm.kl.place != "loss")
        ),
        "algorithm.kl.coef={algorithm.kl.coef:g} compares a flow model with itself without adapters, in the loss: "
        "set policy.lora.rank above 0 and algorithm.kl.place=loss, or algorithm.kl.coef=0",
    ),
    _adapters_are_named,
    _window_lies_in_the_schedule,
    _window_has_the_last_step,
    _losses_have_what_they_need,
    RuleRow(
        lambda c: c.warm_start.text_dropout != 0 and (not c.sampler.denoises or c.sampler.flow.guidance <= 1),
        "warm_start.text_dropout={warm_start.text_dropout:g} teaches a flow model its negative prompt, and "
        "sampler.kind={sampler.kind} with sampler.flow.guidance={sampler.flow.guidance:g} samples without one: set "
        "warm_start.text_dropout=0, or sampler=flow with a guidance above 1",
    ),
    RuleRow(
        lambda c: c.algorithm.slow_copy is not None and c.learner.backend == "deepspeed",
        "algorithm.losses.nft.max_decay={algorithm.slow_copy.max_decay:g} exchanges weights with their slow copy, "
        "which learner.backend=deepspeed does not allow: use learner=fsdp2, or set max_decay to 0",
    ),
    RuleRow(
        lambda c: (
            c.offline.is_on and c.sampler.is_flow and c.learner.backend == "deepspeed" and c.learner.zero_stage == 3
        ),
        "offline.job={offline.job} of a flow model exchanges weights with a copy of the initial ones, which "
        "learner.backend=deepspeed with learner.zero_stage=3 does not allow: set learner.zero_stage=2, or use "
        "learner=fsdp2",
    ),
    _nothing_reads_tokens,
    _nothing_reads_text,
    _vrl_has_its_schedule,
)
