"""The registry of checks: one entry each, in the order in which findings of one verdict are shown."""

from __future__ import annotations

from mobula.deploy.tools.diagnose.data import model, rows
from mobula.deploy.tools.diagnose.records.registry import Check, Needs
from mobula.deploy.tools.diagnose.responses import labels, language, truncation, variety
from mobula.deploy.tools.diagnose.rewards import components, exploitation, groups, parser, trend
from mobula.deploy.tools.diagnose.updates import divergence, engine, limits, progress, step_size

CHECKS: tuple[Check, ...] = (
    Check(model.CHECKPOINT, "model files and chat template", Needs.CONFIG, model.check_checkpoint),
    Check(progress.NAME, "finished steps", Needs.CONFIG, progress.check_progress),
    Check(engine.STALE, "weights of the engines", Needs.STEPS, engine.check_weights),
    Check(engine.GAP, "log-probs of engine and learner", Needs.STEPS, engine.check_gap),
    Check(parser.NAME, "answers that the reward finds", Needs.STEPS, parser.check_parser),
    Check(truncation.TRUNCATION, "truncated responses", Needs.STEPS, truncation.check_truncation),
    Check(truncation.END, "end of text", Needs.ANSWERS, truncation.check_end_of_text),
    Check(components.COMPONENTS, "components of the reward", Needs.STEPS, components.check_components),
    Check(components.PAID_LENGTH, "reward and length", Needs.STEPS, components.check_length),
    Check(exploitation.NAME, "signs that the reward is exploited", Needs.STEPS, exploitation.check_exploitation),
    Check(rows.PICTURES, "pictures", Needs.DATA, rows.check_pictures),
    Check(rows.LEAKS, "training rows in the held-out split", Needs.DATA, rows.check_leaks),
    Check(rows.DUPLICATES, "repeated prompts", Needs.DATA, rows.check_duplicates),
    Check(rows.LABELS, "distribution of labels", Needs.DATA, rows.check_label_distribution),
    Check(labels.NAME, "answers against labels", Needs.ANSWERS, labels.check_labels),
    Check(variety.NAME, "differences of siblings", Needs.ANSWERS, variety.check_variety),
    Check(language.NAME, "languages of responses", Needs.ANSWERS, language.check_language),
    Check(groups.NAME, "groups with equal rewards", Needs.STEPS, groups.check_groups),
    Check(step_size.LEARNING_RATE, "size of an update", Needs.STEPS, step_size.check_learning_rate),
    Check(step_size.SKIPPED, "optimizer steps", Needs.STEPS, step_size.check_skipped_steps),
    Check(limits.CLIPPED, "clipped tokens", Needs.STEPS, limits.check_clipped),
    Check(limits.OVER_AGE, "tokens of old weights", Needs.STEPS, limits.check_over_age),
    Check(limits.REJECTED, "rejected groups", Needs.STEPS, limits.check_rejected),
    Check(divergence.KL_WEIGHT, "weight of the KL term", Needs.CONFIG, divergence.check_kl_weight),
    Check(divergence.KL, "distance from the reference", Needs.STEPS, divergence.check_kl),
    Check(divergence.ENTROPY, "entropy", Needs.STEPS, divergence.check_entropy),
    Check(model.FROZEN, "frozen parts", Needs.MODEL, model.check_frozen),
    Check(model.ADAPTERS, "layers with adapters", Needs.MODEL, model.check_adapters),
    Check(trend.NAME, "trend of the reward", Needs.STEPS, trend.check_trend),
)
