"""Rules of the algorithm."""

from __future__ import annotations

from mobula.configs.rules.row import Rule, RuleRow
from mobula.configs.schema.algorithm import TURNWISE, VALUED, WHITENED
from mobula.configs.schema.rewards import ENVIRONMENT
from mobula.configs.schema.run import RunConfig


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


RULES: tuple[Rule, ...] = (
    RuleRow(
        lambda c: c.algorithm.num_minibatches > c.algorithm.prompts_per_step,
        "algorithm.num_minibatches={algorithm.num_minibatches} is more than algorithm.prompts_per_step="
        "{algorithm.prompts_per_step}: a minibatch holds at least one group, so lower algorithm.num_minibatches or "
        "raise algorithm.prompts_per_step",
    ),
    RuleRow(
        lambda c: c.algorithm.stragglers != "wait" and c.algorithm.max_staleness <= 0,
        "algorithm.stragglers=overtake needs groups beyond those of the step, and algorithm.max_staleness=0 admits "
        "none: set algorithm.max_staleness=1 or more, or algorithm.stragglers=wait",
    ),
    RuleRow(
        lambda c: c.algorithm.samples_per_prompt <= 1 and c.algorithm.is_group_relative,
        "algorithm.advantage={algorithm.advantage} compares siblings but algorithm.samples_per_prompt="
        "{algorithm.samples_per_prompt}: set algorithm.samples_per_prompt to 2 or more, or "
        "algorithm.advantage=reinforce",
    ),
    RuleRow(
        lambda c: c.algorithm.samples_per_prompt <= 1 and c.algorithm.drop_uniform_groups,
        "algorithm.drop_uniform_groups=true rejects every group when algorithm.samples_per_prompt=1, so no step "
        "would ever fill: set algorithm.drop_uniform_groups=false",
    ),
    _every_rank_gets_samples,
    RuleRow(
        lambda c: c.algorithm.advantage == "pass_at_k" and c.algorithm.pass_k >= c.algorithm.samples_per_prompt,
        "algorithm.pass_k={algorithm.pass_k} leaves no subsets of algorithm.samples_per_prompt="
        "{algorithm.samples_per_prompt} siblings to compare: lower algorithm.pass_k or raise "
        "algorithm.samples_per_prompt",
    ),
    _components_are_not_shaped,
    RuleRow(
        lambda c: c.algorithm.shaping.whiten and c.algorithm.advantage in WHITENED,
        "algorithm.advantage={algorithm.advantage} is standardised over the step already: set "
        "algorithm.shaping.whiten=false",
    ),
    RuleRow(
        lambda c: c.algorithm.correction != "none" and c.algorithm.old_logprobs == "engine",
        "algorithm.correction={algorithm.correction} weighs the policy of algorithm.old_logprobs against the "
        "engine's policy, and algorithm.old_logprobs=engine makes them one: set algorithm.old_logprobs=recomputed, "
        "or algorithm.correction=none",
    ),
    RuleRow(
        lambda c: c.algorithm.old_logprobs == "interpolated" and c.algorithm.max_staleness <= 0,
        "algorithm.old_logprobs=interpolated approximates by the age of tokens, and algorithm.max_staleness=0 trains "
        "tokens of age 0 alone: set algorithm.old_logprobs=recomputed, or algorithm.max_staleness=1 or more",
    ),
    RuleRow(
        lambda c: c.algorithm.corrections.icepop.low >= c.algorithm.corrections.icepop.high,
        "algorithm.corrections.icepop.low={algorithm.corrections.icepop.low:g} is not below "
        "algorithm.corrections.icepop.high={algorithm.corrections.icepop.high:g}, so every token would be rejected: "
        "lower the one or raise the other",
    ),
    RuleRow(
        lambda c: c.algorithm.kl.controller != "fixed" and c.algorithm.kl.coef <= 0,
        "algorithm.kl.controller=adaptive multiplies algorithm.kl.coef, which is 0: set algorithm.kl.coef to where "
        "it starts, e.g. 0.01, or algorithm.kl.controller=fixed",
    ),
    RuleRow(
        lambda c: c.algorithm.kl.coef != 0 and (c.algorithm.kl.estimator, c.algorithm.kl.place) == ("k1", "loss"),
        "algorithm.kl.estimator=k1 has an expected gradient of 0 as a term of the loss: set "
        "algorithm.kl.estimator=k2 or k3, or algorithm.kl.place=reward",
    ),
    RuleRow(
        lambda c: bool(c.algorithm.distillation.teachers) and not c.algorithm.distillation.teacher,
        "algorithm.distillation.teachers={algorithm.distillation.teachers} leaves rows of other labels without a "
        "teacher: set algorithm.distillation.teacher=CHECKPOINT for them, and use algorithm=distill",
    ),
    RuleRow(
        lambda c: c.algorithm.distillation.teacher != "" and c.algorithm.distillation.coef <= 0,
        "algorithm.distillation.teacher={algorithm.distillation.teacher} has no weight: set "
        "algorithm.distillation.coef=1 or use algorithm=distill, or leave the teacher out",
    ),
    RuleRow(
        lambda c: (
            c.algorithm.distillation.coef > 0
            and not c.algorithm.distillation.teacher
            and not c.algorithm.distillation.teachers
        ),
        "algorithm.distillation.coef={algorithm.distillation.coef:g} is the weight of a teacher, and there is none: "
        "give algorithm.distillation.teacher=CHECKPOINT, a folder or hub name with the tokenizer of policy.model, or "
        "set algorithm.distillation.coef=0",
    ),
    RuleRow(
        lambda c: c.algorithm.distillation.is_on and c.algorithm.kl.coef != 0,
        "algorithm.distillation.teacher={algorithm.distillation.teacher} takes the place of the reference policy, "
        "and algorithm.kl.coef={algorithm.kl.coef:g} needs that: set algorithm.kl.coef=0, or leave the teacher out",
    ),
    RuleRow(
        lambda c: (
            c.algorithm.distillation.is_on
            and c.algorithm.distillation.reward_weight <= 0
            and c.algorithm.drop_uniform_groups
        ),
        "algorithm.drop_uniform_groups=true rejects groups of equal rewards, and with "
        "algorithm.distillation.reward_weight=0 rewards train nothing: set algorithm.drop_uniform_groups=false, or "
        "algorithm.distillation.reward_weight=1",
    ),
    RuleRow(
        lambda c: c.algorithm.supervised.is_on and not c.algorithm.supervised.path,
        "algorithm.supervised.coef={algorithm.supervised.coef:g} has no rows to train on: set "
        "algorithm.supervised.path to a folder with train.jsonl, or algorithm.supervised.coef=0",
    ),
    RuleRow(
        lambda c: c.algorithm.supervised.path != "" and not c.algorithm.supervised.is_on,
        "algorithm.supervised.path={algorithm.supervised.path} is not read with algorithm.supervised.coef=0: set "
        "algorithm.supervised.coef to the weight of its rows, or leave the path out",
    ),
    RuleRow(
        lambda c: c.algorithm.supervised.is_on and c.offline.is_on,
        "algorithm.supervised.coef={algorithm.supervised.coef:g} adds rows to steps of RL, and "
        "offline.job={offline.job} trains on rows alone: set algorithm.supervised.coef=0 and path=''",
    ),
    RuleRow(
        lambda c: c.algorithm.supervised.is_on and c.sampler.makes_images and not c.offline.is_on,
        "algorithm.supervised.coef={algorithm.supervised.coef:g} trains the tokens of conversations, and sampler.kind="
        "{sampler.kind} makes images: set algorithm.supervised.coef=0 and path='', or sampler=vllm",
    ),
    RuleRow(
        lambda c: (
            c.algorithm.supervised.is_on
            and c.algorithm.supervised.batch_size < c.resources.learner.num_workers // c.learner.sequence_parallel
        ),
        "algorithm.supervised.batch_size={algorithm.supervised.batch_size} leaves some of "
        "resources.learner.num_workers={resources.learner.num_workers} ranks without a row: raise "
        "algorithm.supervised.batch_size or use fewer learner workers",
    ),
    _other_policies_have_a_ratio,
    RuleRow(
        lambda c: c.algorithm.shaping.length_penalty != 0 and c.algorithm.samples_per_prompt <= 1,
        "algorithm.shaping.length_penalty={algorithm.shaping.length_penalty:g} compares the lengths of siblings, and "
        "algorithm.samples_per_prompt=1 leaves none: raise algorithm.samples_per_prompt, or set "
        "algorithm.shaping.length_penalty=0",
    ),
    RuleRow(
        lambda c: c.algorithm.advantage in VALUED and not c.algorithm.critic.is_on,
        "algorithm.advantage={algorithm.advantage} reads the values of a critic, and algorithm.critic.place=none "
        "leaves none: use algorithm=ppo_gae, set algorithm.critic.place=learner_ranks, or choose another "
        "algorithm.advantage",
    ),
    _critic_has_a_reader,
    _turns_are_credited_by_what_they_earned,
    RuleRow(
        lambda c: c.algorithm.critic.is_on and c.algorithm.critic.warmup_steps >= c.num_steps,
        "algorithm.critic.warmup_steps={algorithm.critic.warmup_steps} leaves none of num_steps={num_steps} to the "
        "policy: lower the one or raise the other",
    ),
    RuleRow(
        lambda c: (
            c.algorithm.critic.is_on and c.algorithm.distillation.is_on and c.algorithm.distillation.reward_weight <= 0
        ),
        "algorithm.critic.place={algorithm.critic.place} predicts rewards, and "
        "algorithm.distillation.reward_weight=0 trains nothing on them: set algorithm.distillation.reward_weight=1, "
        "or choose an algorithm.advantage without a critic",
    ),
)
