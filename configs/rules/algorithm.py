"""Rules of the algorithm."""

from __future__ import annotations

from mobula.configs.schema.algorithm import TURNWISE, VALUED, WHITENED
from mobula.configs.schema.rewards import ENVIRONMENT
from mobula.configs.schema.run import RunConfig


def _minibatches_hold_groups(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.num_minibatches <= algorithm.prompts_per_step:
        return None
    return (
        f"algorithm.num_minibatches={algorithm.num_minibatches} is more than "
        f"algorithm.prompts_per_step={algorithm.prompts_per_step}: a minibatch holds at least one group, "
        "so lower algorithm.num_minibatches or raise algorithm.prompts_per_step"
    )


def _stragglers_can_be_overtaken(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.stragglers == "wait" or algorithm.max_staleness > 0:
        return None
    return (
        "algorithm.stragglers=overtake needs groups beyond those of the step, and algorithm.max_staleness=0 admits "
        "none: set algorithm.max_staleness=1 or more, or algorithm.stragglers=wait"
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
    if samples >= num_ranks // config.learner.sequence_parallel:  # the ranks of a row share its samples
        return None
    return (
        f"a minibatch holds {samples} samples (algorithm.prompts_per_step={algorithm.prompts_per_step} / "
        f"algorithm.num_minibatches={algorithm.num_minibatches} * "
        f"algorithm.samples_per_prompt={algorithm.samples_per_prompt}) but "
        f"resources.{role}.num_workers={num_ranks}: raise algorithm.prompts_per_step or use fewer {role} workers"
    )


def _pass_k_fits_the_group(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.advantage != "pass_at_k" or algorithm.pass_k < algorithm.samples_per_prompt:
        return None
    return (
        f"algorithm.pass_k={algorithm.pass_k} leaves no subsets of algorithm.samples_per_prompt="
        f"{algorithm.samples_per_prompt} siblings to compare: lower algorithm.pass_k or raise "
        "algorithm.samples_per_prompt"
    )


def _components_are_not_shaped(config: RunConfig) -> str | None:
    shaping = config.algorithm.shaping
    changes = {
        "repetition_penalty": shaping.repetition_penalty > 0,
        "length_penalty": shaping.length_penalty > 0,
        "running_moments": shaping.running_moments != "none",
        "reward_clip": shaping.reward_clip > 0,
    }
    change = next((name for name, is_on in changes.items() if is_on), None)
    if config.algorithm.advantage != "gdpo" or change is None:
        return None
    return (
        f"algorithm.advantage=gdpo reads the components of the reward, and algorithm.shaping.{change} changes their "
        f"sum: turn algorithm.shaping.{change} off, or choose another algorithm.advantage"
    )


def _advantages_are_whitened_once(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if not algorithm.shaping.whiten or algorithm.advantage not in WHITENED:
        return None
    return (
        f"algorithm.advantage={algorithm.advantage} is standardised over the step already: set "
        "algorithm.shaping.whiten=false"
    )


def _corrections_have_two_policies(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.correction == "none" or algorithm.old_logprobs != "engine":
        return None
    return (
        f"algorithm.correction={algorithm.correction} weighs the policy of algorithm.old_logprobs against the engine's "
        "policy, and algorithm.old_logprobs=engine makes them one: set algorithm.old_logprobs=recomputed, or "
        "algorithm.correction=none"
    )


def _interpolation_has_ages(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.old_logprobs != "interpolated" or algorithm.max_staleness > 0:
        return None
    return (
        "algorithm.old_logprobs=interpolated approximates by the age of tokens, and algorithm.max_staleness=0 trains "
        "tokens of age 0 alone: set algorithm.old_logprobs=recomputed, or algorithm.max_staleness=1 or more"
    )


def _rejection_keeps_something(config: RunConfig) -> str | None:
    icepop = config.algorithm.corrections.icepop
    if icepop.low < icepop.high:
        return None
    return (
        f"algorithm.corrections.icepop.low={icepop.low:g} is not below algorithm.corrections.icepop.high="
        f"{icepop.high:g}, so every token would be rejected: lower the one or raise the other"
    )


def _adaptive_kl_has_a_start(config: RunConfig) -> str | None:
    kl = config.algorithm.kl
    if kl.controller == "fixed" or kl.coef > 0:
        return None
    return (
        "algorithm.kl.controller=adaptive multiplies algorithm.kl.coef, which is 0: set algorithm.kl.coef to where it "
        "starts, e.g. 0.01, or algorithm.kl.controller=fixed"
    )


def _loss_gradient_is_that_of_the_kl(config: RunConfig) -> str | None:
    kl = config.algorithm.kl
    if kl.coef == 0 or (kl.estimator, kl.place) != ("k1", "loss"):
        return None
    return (
        "algorithm.kl.estimator=k1 has an expected gradient of 0 as a term of the loss: set algorithm.kl.estimator=k2 "
        "or k3, or algorithm.kl.place=reward"
    )


def _teacher_has_a_name_and_a_weight(config: RunConfig) -> str | None:
    teacher, coef = config.algorithm.distillation.teacher, config.algorithm.distillation.coef
    if config.algorithm.distillation.teachers and not teacher:
        return (
            f"algorithm.distillation.teachers={config.algorithm.distillation.teachers} leaves rows of other labels "
            "without a teacher: set algorithm.distillation.teacher=CHECKPOINT for them, and use algorithm=distill"
        )
    if (teacher != "") == (coef > 0):
        return None
    if teacher:
        return (
            f"algorithm.distillation.teacher={teacher} has no weight: set algorithm.distillation.coef=1 or use "
            "algorithm=distill, or leave the teacher out"
        )
    return (
        f"algorithm.distillation.coef={coef:g} is the weight of a teacher, and there is none: give "
        "algorithm.distillation.teacher=CHECKPOINT, a folder or hub name with the tokenizer of policy.model, or set "
        "algorithm.distillation.coef=0"
    )


def _scorers_serve_one_checkpoint(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if not algorithm.distillation.is_on or algorithm.kl.coef == 0:
        return None
    return (
        f"algorithm.distillation.teacher={algorithm.distillation.teacher} takes the place of the reference policy, and "
        f"algorithm.kl.coef={algorithm.kl.coef:g} needs that: set algorithm.kl.coef=0, or leave the teacher out"
    )


def _teacher_sees_uniform_groups(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    distillation = algorithm.distillation
    if not distillation.is_on or distillation.reward_weight > 0 or not algorithm.drop_uniform_groups:
        return None
    return (
        "algorithm.drop_uniform_groups=true rejects groups of equal rewards, and with "
        "algorithm.distillation.reward_weight=0 rewards train nothing: set algorithm.drop_uniform_groups=false, or "
        "algorithm.distillation.reward_weight=1"
    )


def _supervised_rows_have_a_folder_and_a_weight(config: RunConfig) -> str | None:
    supervised = config.algorithm.supervised
    if supervised.is_on == bool(supervised.path):
        return None
    if supervised.is_on:
        return (
            f"algorithm.supervised.coef={supervised.coef:g} has no rows to train on: set algorithm.supervised.path to "
            "a folder with train.jsonl, or algorithm.supervised.coef=0"
        )
    return (
        f"algorithm.supervised.path={supervised.path} is not read with algorithm.supervised.coef=0: set "
        "algorithm.supervised.coef to the weight of its rows, or leave the path out"
    )


def _supervised_rows_have_a_policy_of_tokens(config: RunConfig) -> str | None:
    supervised, sampler = config.algorithm.supervised, config.sampler
    if not supervised.is_on or not (sampler.is_flow or sampler.draws_tokens or config.offline.is_on):
        return None
    if config.offline.is_on:
        return (
            f"algorithm.supervised.coef={supervised.coef:g} adds rows to steps of RL, and offline.job="
            f"{config.offline.job} trains on rows alone: set algorithm.supervised.coef=0 and path=''"
        )
    return (
        f"algorithm.supervised.coef={supervised.coef:g} trains the tokens of conversations, and sampler.kind="
        f"{sampler.kind} makes images: set algorithm.supervised.coef=0 and path='', or sampler=vllm"
    )


def _every_rank_gets_a_supervised_row(config: RunConfig) -> str | None:
    supervised, num_ranks = config.algorithm.supervised, config.resources.learner.num_workers
    if not supervised.is_on or supervised.batch_size >= num_ranks // config.learner.sequence_parallel:
        return None
    return (
        f"algorithm.supervised.batch_size={supervised.batch_size} leaves some of resources.learner.num_workers="
        f"{num_ranks} ranks without a row: raise algorithm.supervised.batch_size or use fewer learner workers"
    )


def _other_policies_have_a_ratio(config: RunConfig) -> str | None:
    """Later minibatches and older tokens are off-policy; a correction can compensate for staleness only."""
    algorithm = config.algorithm
    if algorithm.loss != "reinforce":
        return None
    key = next((name for name in ("num_epochs", "num_minibatches") if getattr(algorithm, name) > 1), None)
    if key is None and algorithm.max_staleness > 0 and algorithm.correction == "none":
        return (
            f"algorithm.loss=reinforce has no ratio, so algorithm.max_staleness={algorithm.max_staleness} would train "
            "on tokens of an older policy as if they were its own: set algorithm.max_staleness=0, or "
            "algorithm.old_logprobs=recomputed with algorithm.correction=tis_token, or algorithm.loss=cispo"
        )
    if key is None:
        return None
    return (
        f"algorithm.loss=reinforce has no ratio, so algorithm.{key}={getattr(algorithm, key)} would train on tokens of "
        f"another policy as if they were its own: set algorithm.{key}=1, or algorithm.loss=cispo"
    )


def _lengths_have_siblings(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.shaping.length_penalty == 0 or algorithm.samples_per_prompt > 1:
        return None
    return (
        f"algorithm.shaping.length_penalty={algorithm.shaping.length_penalty:g} compares the lengths of siblings, and "
        "algorithm.samples_per_prompt=1 leaves none: raise algorithm.samples_per_prompt, or set "
        "algorithm.shaping.length_penalty=0"
    )


def _values_have_a_critic(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.advantage not in VALUED or algorithm.critic.is_on:
        return None
    return (
        f"algorithm.advantage={algorithm.advantage} reads the values of a critic, and algorithm.critic.place=none "
        "leaves none: use algorithm=ppo_gae, set algorithm.critic.place=learner_ranks, or choose another "
        "algorithm.advantage"
    )


def _critic_has_a_reader(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.advantage in VALUED or not algorithm.critic.is_on:
        return None
    return (
        f"algorithm.critic.place={algorithm.critic.place} trains a critic, and algorithm.advantage="
        f"{algorithm.advantage} does not read its values: set algorithm.advantage={VALUED[0]}, or "
        "algorithm.critic.place=none"
    )


def _turns_are_credited_by_what_they_earned(config: RunConfig) -> str | None:
    algorithm = config.algorithm
    has_reward = any(component.function == ENVIRONMENT for component in config.rewards.components)
    if algorithm.advantage in TURNWISE and not (config.environment.is_on and has_reward):
        return (
            f"algorithm.advantage={algorithm.advantage} credits the turns of episodes with the rewards of their "
            "environment: set environment=OPTION rewards=environment, or choose another algorithm.advantage"
        )
    if algorithm.advantage in TURNWISE and algorithm.gamma < 1:
        return (
            f"algorithm.gamma={algorithm.gamma:g} discounts by tokens, and algorithm.advantage={algorithm.advantage} "
            "by turns: set algorithm.gamma=1, and algorithm.turn_discount to what was meant"
        )
    shaping = algorithm.shaping
    is_by_turn = config.environment.is_on and has_reward and algorithm.advantage in (*TURNWISE, *VALUED)
    if is_by_turn and (shaping.running_moments != "none" or shaping.reward_clip > 0):
        return (
            f"algorithm.advantage={algorithm.advantage} takes the rewards of turns as the environment paid them, and "
            "algorithm.shaping.running_moments and reward_clip change their sum: set both off "
            "(running_moments=none reward_clip=0)"
        )
    return None


def _critic_leaves_steps_to_the_policy(config: RunConfig) -> str | None:
    critic = config.algorithm.critic
    if not critic.is_on or critic.warmup_steps < config.num_steps:
        return None
    return (
        f"algorithm.critic.warmup_steps={critic.warmup_steps} leaves none of num_steps={config.num_steps} to the "
        "policy: lower the one or raise the other"
    )


def _critic_predicts_what_is_trained(config: RunConfig) -> str | None:
    distillation = config.algorithm.distillation
    if not config.algorithm.critic.is_on or not distillation.is_on or distillation.reward_weight > 0:
        return None
    return (
        f"algorithm.critic.place={config.algorithm.critic.place} predicts rewards, and "
        "algorithm.distillation.reward_weight=0 trains nothing on them: set algorithm.distillation.reward_weight=1, or "
        "choose an algorithm.advantage without a critic"
    )


RULES = (
    _minibatches_hold_groups,
    _stragglers_can_be_overtaken,
    _groups_have_siblings,
    _uniform_groups_can_differ,
    _every_rank_gets_samples,
    _pass_k_fits_the_group,
    _components_are_not_shaped,
    _advantages_are_whitened_once,
    _corrections_have_two_policies,
    _interpolation_has_ages,
    _rejection_keeps_something,
    _adaptive_kl_has_a_start,
    _loss_gradient_is_that_of_the_kl,
    _teacher_has_a_name_and_a_weight,
    _scorers_serve_one_checkpoint,
    _teacher_sees_uniform_groups,
    _supervised_rows_have_a_folder_and_a_weight,
    _supervised_rows_have_a_policy_of_tokens,
    _every_rank_gets_a_supervised_row,
    _other_policies_have_a_ratio,
    _lengths_have_siblings,
    _values_have_a_critic,
    _critic_has_a_reader,
    _turns_are_credited_by_what_they_earned,
    _critic_leaves_steps_to_the_policy,
    _critic_predicts_what_is_trained,
)
