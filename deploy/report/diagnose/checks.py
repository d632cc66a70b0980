"""The registry of checks: one entry each, in the order in which findings of one verdict are shown."""

from __future__ import annotations

from mobula.deploy.report.diagnose import data_checks, response_checks, reward_checks, update_checks
from mobula.deploy.report.diagnose.material import NOTHING_TO_COMPARE, SYMPTOMS, Check, Needs

CHECKS: tuple[Check, ...] = (
    Check(data_checks.CHECKPOINT, Needs.CONFIG, data_checks.check_checkpoint),
    Check(update_checks.NAME, Needs.CONFIG, update_checks.check_progress),
    Check(update_checks.STALE, Needs.STEPS, update_checks.check_weights, (update_checks.GAP, *SYMPTOMS)),
    Check(update_checks.GAP, Needs.STEPS, update_checks.check_gap),
    Check(response_checks.SAMPLING, Needs.STEPS, response_checks.check_sampling),
    Check(reward_checks.NOISE, Needs.ANSWERS, reward_checks.check_noise),
    Check(reward_checks.PARSER_NAME, Needs.STEPS, reward_checks.check_parser, NOTHING_TO_COMPARE),
    Check(
        response_checks.TRUNCATION,
        Needs.STEPS,
        response_checks.check_truncation,
        (response_checks.END, reward_checks.PARSER_NAME, *NOTHING_TO_COMPARE),
    ),
    Check(response_checks.END, Needs.ANSWERS, response_checks.check_end_of_text),
    Check(reward_checks.COMPONENTS, Needs.STEPS, reward_checks.check_components, SYMPTOMS),
    Check(reward_checks.PAID_LENGTH, Needs.STEPS, reward_checks.check_length, SYMPTOMS),
    Check(reward_checks.EXPLOITATION_NAME, Needs.STEPS, reward_checks.check_exploitation),
    Check(
        data_checks.PICTURES,
        Needs.DATA,
        data_checks.check_pictures,
        (response_checks.LABELS_NAME, reward_checks.GROUPS_NAME, reward_checks.TREND_NAME),
    ),
    Check(data_checks.LEAKS, Needs.DATA, data_checks.check_leaks),
    Check(data_checks.DUPLICATES, Needs.DATA, data_checks.check_duplicates),
    Check(data_checks.LABELS, Needs.DATA, data_checks.check_label_distribution),
    Check(response_checks.LABELS_NAME, Needs.ANSWERS, response_checks.check_labels),
    Check(
        response_checks.VARIETY_NAME,
        Needs.ANSWERS,
        response_checks.check_variety,
        (update_checks.ENTROPY, reward_checks.GROUPS_NAME),
    ),
    Check(response_checks.LANGUAGE_NAME, Needs.ANSWERS, response_checks.check_language),
    Check(reward_checks.GROUPS_NAME, Needs.STEPS, reward_checks.check_groups),
    Check(update_checks.LEARNING_RATE, Needs.STEPS, update_checks.check_learning_rate),
    Check(update_checks.SKIPPED, Needs.STEPS, update_checks.check_skipped_steps),
    Check(update_checks.CLIPPED, Needs.STEPS, update_checks.check_clipped),
    Check(update_checks.OVER_AGE, Needs.STEPS, update_checks.check_over_age),
    Check(update_checks.REJECTED, Needs.STEPS, update_checks.check_rejected),
    Check(
        update_checks.KL_WEIGHT,
        Needs.CONFIG,
        update_checks.check_kl_weight,
        (update_checks.LEARNING_RATE, reward_checks.TREND_NAME),
    ),
    Check(update_checks.KL, Needs.STEPS, update_checks.check_kl),
    Check(update_checks.ENTROPY, Needs.STEPS, update_checks.check_entropy),
    Check(
        data_checks.FROZEN,
        Needs.MODEL,
        data_checks.check_frozen,
        (update_checks.LEARNING_RATE, update_checks.SKIPPED, reward_checks.TREND_NAME),
    ),
    Check(data_checks.ADAPTERS, Needs.MODEL, data_checks.check_adapters),
    Check(reward_checks.TREND_NAME, Needs.STEPS, reward_checks.check_trend),
)
