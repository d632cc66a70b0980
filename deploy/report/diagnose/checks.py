"""The registry of checks: one entry each, in the order in which findings of one verdict are shown."""

from __future__ import annotations

from mobula.deploy.report.diagnose import data_checks as model
from mobula.deploy.report.diagnose import data_checks as rows
from mobula.deploy.report.diagnose import response_checks, reward_checks, update_checks
from mobula.deploy.report.diagnose import reward_checks as components
from mobula.deploy.report.diagnose import update_checks as divergence
from mobula.deploy.report.diagnose import update_checks as engine
from mobula.deploy.report.diagnose import update_checks as progress
from mobula.deploy.report.diagnose.material import NOTHING_TO_COMPARE, SYMPTOMS, Check, Needs

CHECKS: tuple[Check, ...] = (
    Check(model.CHECKPOINT, Needs.CONFIG, model.check_checkpoint),
    Check(progress.NAME, Needs.CONFIG, progress.check_progress),
    Check(engine.STALE, Needs.STEPS, engine.check_weights, (engine.GAP, *SYMPTOMS)),
    Check(engine.GAP, Needs.STEPS, engine.check_gap),
    Check(response_checks.SAMPLING, Needs.STEPS, response_checks.check_sampling),
    Check(components.NOISE, Needs.ANSWERS, components.check_noise),
    Check(reward_checks.PARSER_NAME, Needs.STEPS, reward_checks.check_parser, NOTHING_TO_COMPARE),
    Check(
        response_checks.TRUNCATION,
        Needs.STEPS,
        response_checks.check_truncation,
        (response_checks.END, reward_checks.PARSER_NAME, *NOTHING_TO_COMPARE),
    ),
    Check(response_checks.END, Needs.ANSWERS, response_checks.check_end_of_text),
    Check(components.COMPONENTS, Needs.STEPS, components.check_components, SYMPTOMS),
    Check(components.PAID_LENGTH, Needs.STEPS, components.check_length, SYMPTOMS),
    Check(reward_checks.EXPLOITATION_NAME, Needs.STEPS, reward_checks.check_exploitation),
    Check(
        rows.PICTURES,
        Needs.DATA,
        rows.check_pictures,
        (response_checks.LABELS_NAME, reward_checks.GROUPS_NAME, reward_checks.TREND_NAME),
    ),
    Check(rows.LEAKS, Needs.DATA, rows.check_leaks),
    Check(rows.DUPLICATES, Needs.DATA, rows.check_duplicates),
    Check(rows.LABELS, Needs.DATA, rows.check_label_distribution),
    Check(response_checks.LABELS_NAME, Needs.ANSWERS, response_checks.check_labels),
    Check(
        response_checks.VARIETY_NAME,
        Needs.ANSWERS,
        response_checks.check_variety,
        (divergence.ENTROPY, reward_checks.GROUPS_NAME),
    ),
    Check(response_checks.LANGUAGE_NAME, Needs.ANSWERS, response_checks.check_language),
    Check(reward_checks.GROUPS_NAME, Needs.STEPS, reward_checks.check_groups),
    Check(update_checks.LEARNING_RATE, Needs.STEPS, update_checks.check_learning_rate),
    Check(update_checks.SKIPPED, Needs.STEPS, update_checks.check_skipped_steps),
    Check(update_checks.CLIPPED, Needs.STEPS, update_checks.check_clipped),
    Check(update_checks.OVER_AGE, Needs.STEPS, update_checks.check_over_age),
    Check(update_checks.REJECTED, Needs.STEPS, update_checks.check_rejected),
    Check(
        divergence.KL_WEIGHT,
        Needs.CONFIG,
        divergence.check_kl_weight,
        (update_checks.LEARNING_RATE, reward_checks.TREND_NAME),
    ),
    Check(divergence.KL, Needs.STEPS, divergence.check_kl),
    Check(divergence.ENTROPY, Needs.STEPS, divergence.check_entropy),
    Check(
        model.FROZEN,
        Needs.MODEL,
        model.check_frozen,
        (update_checks.LEARNING_RATE, update_checks.SKIPPED, reward_checks.TREND_NAME),
    ),
    Check(model.ADAPTERS, Needs.MODEL, model.check_adapters),
    Check(reward_checks.TREND_NAME, Needs.STEPS, reward_checks.check_trend),
)
