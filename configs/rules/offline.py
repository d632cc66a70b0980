"""Rules of an offline job."""

from __future__ import annotations

from mobula.configs.schema.data import DataKind
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
        f"data.kind={kind} holds conversations, which offline jobs train on: use `mobula sft`, `mobula reward-model` "
        "or `mobula dpo`, or another data.kind"
    )


def _conversations_have_no_suffix(config: RunConfig) -> str | None:
    if not config.offline.is_on or config.question_suffix == "":
        return None
    return (
        f"data.prompt_suffix={config.data.prompt_suffix!r} is put behind questions, and rows of offline.job="
        f"{config.offline.job} are whole conversations: set data.prompt_suffix=''"
    )


def _rows_replace_rollouts(config: RunConfig) -> str | None:
    """Keys that offline jobs do not use."""
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


def _the_head_is_trained(config: RunConfig) -> str | None:
    if config.offline.job != "reward_model" or not config.policy.lora.is_on:
        return None
    return (
        f"policy.lora.rank={config.policy.lora.rank} trains adapters alone, and offline.job=reward_model has a new "
        "score head to train: set policy.lora.rank=0, and policy.freeze to leave parts of the backbone as they are"
    )


def _every_rank_gets_a_row(config: RunConfig) -> str | None:
    num_ranks, num_rows = config.resources.learner.num_workers, config.offline.batch_size
    if not config.offline.is_on or num_rows >= num_ranks // config.learner.sequence_parallel:
        return None
    return (
        f"offline.batch_size={num_rows} leaves some of resources.learner.num_workers={num_ranks} ranks without a row: "
        "raise offline.batch_size or use fewer learner workers"
    )


def _smoothing_is_read(config: RunConfig) -> str | None:
    dpo = config.offline.dpo
    if config.offline.job != "dpo" or dpo.loss == "sigmoid" or dpo.label_smoothing == 0:
        return None
    return (
        f"offline.dpo.label_smoothing={dpo.label_smoothing:g} is a part of the logistic loss, and offline.dpo.loss="
        f"{dpo.loss} has none: set offline.dpo.label_smoothing=0, or offline.dpo.loss=sigmoid"
    )


def _a_margin_is_read(config: RunConfig) -> str | None:
    chosen = config.offline.reward_model
    if config.offline.job != "reward_model" or chosen.loss == "bradley_terry" or chosen.margin == 0:
        return None
    return (
        f"offline.reward_model.margin={chosen.margin:g} is between scores of a pair, and offline.reward_model.loss="
        f"{chosen.loss} has no pairs: set offline.reward_model.margin=0, or offline.reward_model.loss=bradley_terry"
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | str) else f"{value:g}"


RULES = (
    _rows_fit_the_job,
    _conversations_have_no_suffix,
    _rows_replace_rollouts,
    _the_head_is_trained,
    _every_rank_gets_a_row,
    _smoothing_is_read,
    _a_margin_is_read,
)
