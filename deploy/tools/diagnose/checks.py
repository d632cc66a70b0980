"""The registry of checks: one entry each, in the order in which findings of one verdict are shown."""

from __future__ import annotations

from mobula.deploy.tools.diagnose.data import model, rows
from mobula.deploy.tools.diagnose.records.registry import NOTHING_TO_COMPARE, SYMPTOMS, Check, Needs
from mobula.deploy.tools.diagnose.responses import labels, language, truncation, variety
from mobula.deploy.tools.diagnose.rewards import components, exploitation, groups, parser, trend
from mobula.deploy.tools.diagnose.updates import divergence, engine, limits, progress, step_size

CHECKS: tuple[Check, ...] = (
    Check(model.CHECKPOINT, Needs.CONFIG, model.check_checkpoint),
    Check(progress.NAME, Needs.CONFIG, progress.check_progress),
    Check(engine.STALE, Needs.STEPS, engine.check_weights, (engine.GAP, *SYMPTOMS)),
    Check(engine.GAP, Needs.STEPS, engine.check_gap),
    Check(variety.SAMPLING, Needs.STEPS, variety.check_sampling),
    Check(components.NOISE, Needs.ANSWERS, components.check_noise),
    Check(parser.NAME, Needs.STEPS, parser.check_parser, NOTHING_TO_COMPARE),
    Check(
        truncation.TRUNCATION,
        Needs.STEPS,
        truncation.check_truncation,
        (truncation.END, parser.NAME, *NOTHING_TO_COMPARE),
    ),
    Check(truncation.END, Needs.ANSWERS, truncation.check_end_of_text),
    Check(components.COMPONENTS, Needs.STEPS, components.check_components, SYMPTOMS),
    Check(components.PAID_LENGTH, Needs.STEPS, components.check_length, SYMPTOMS),
    Check(exploitation.NAME, Needs.STEPS, exploitation.check_exploitation),
    Check(rows.PICTURES, Needs.DATA, rows.check_pictures, (labels.NAME, groups.NAME, trend.NAME)),
    Check(rows.LEAKS, Needs.DATA, rows.check_leaks),
    Check(rows.DUPLICATES, Needs.DATA, rows.check_duplicates),
    Check(rows.LABELS, Needs.DATA, rows.check_label_distribution),
    Check(labels.NAME, Needs.ANSWERS, labels.check_labels),
    Check(variety.NAME, Needs.ANSWERS, variety.check_variety, (divergence.ENTROPY, groups.NAME)),
    Check(language.NAME, Needs.ANSWERS, language.check_language),
    Check(groups.NAME, Needs.STEPS, groups.check_groups),
    Check(step_size.LEARNING_RATE, Needs.STEPS, step_size.check_learning_rate),
    Check(step_size.SKIPPED, Needs.STEPS, step_size.check_skipped_steps),
    Check(limits.CLIPPED, Needs.STEPS, limits.check_clipped),
    Check(limits.OVER_AGE, Needs.STEPS, limits.check_over_age),
    Check(limits.REJECTED, Needs.STEPS, limits.check_rejected),
    Check(divergence.KL_WEIGHT, Needs.CONFIG, divergence.check_kl_weight, (step_size.LEARNING_RATE, trend.NAME)),
    Check(divergence.KL, Needs.STEPS, divergence.check_kl),
    Check(divergence.ENTROPY, Needs.STEPS, divergence.check_entropy),
    Check(model.FROZEN, Needs.MODEL, model.check_frozen, (step_size.LEARNING_RATE, step_size.SKIPPED, trend.NAME)),
    Check(model.ADAPTERS, Needs.MODEL, model.check_adapters),
    Check(trend.NAME, Needs.STEPS, trend.check_trend),
)
