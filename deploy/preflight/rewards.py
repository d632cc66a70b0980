"""The check of a user's reward functions before a role starts."""

from __future__ import annotations

from mobula.configs.schema import RunConfig
from mobula.rewards.functions import check_users_function
from mobula.rewards.isolation.process import IsolatedProcess


def check_reward_functions(config: RunConfig) -> None:
    """Imports each of them in a process of its own, and compares their parameters with their options.

    Raises:
        ValueError: a function cannot be imported within `timeouts.start_s`, takes no request, or its options are unfit.
    """
    users = [component for component in config.rewards.components if ":" in component.function]
    if config.offline.is_on or not users:
        return
    start_s = config.timeouts.start_s
    isolated = IsolatedProcess(timeout_s=start_s, start_timeout_s=start_s)
    try:
        for component in users:
            check_users_function(component.function, component.options, isolated)
    except ValueError as error:
        raise ValueError(f"rewards.components[{component.name}]: {error}") from error
    finally:
        isolated.close()
