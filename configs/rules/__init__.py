"""Rules between sections of a run's configuration: one module for each subject.

A rule returns what is wrong, with the value got and the next action, or None. Most rules are a condition and a message
(`RuleRow`); the others are functions. All rules are checked, so that a user reads every contradiction at once.
"""

from __future__ import annotations

from mobula.configs.errors import ConfigError
from mobula.configs.rules import algorithm, data, learner, offline, resources, run
from mobula.configs.rules.data import reward_contradictions
from mobula.configs.rules.row import Rule
from mobula.configs.schema.run import RunConfig

RULES: tuple[Rule, ...] = (
    *run.RUN_RULES,
    *resources.RULES,
    *algorithm.RULES,
    *data.ENVIRONMENT_RULES,
    *learner.ROLLOUT_RULES,
    *learner.LEARNER_RULES,
    *offline.OFFLINE_RULES,
    *offline.FLOW_RULES,
    *data.DATA_RULES,
    *run.GUARD_RULES,
)


def checked(config: RunConfig) -> RunConfig:
    """Returns `config` after checking all rules."""
    messages = [message for rule in RULES if (message := rule(config)) is not None]
    messages += reward_contradictions(config.rewards)
    if messages:
        raise ConfigError("\n".join(messages))
    return config
