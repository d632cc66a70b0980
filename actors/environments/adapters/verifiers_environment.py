"""Verifiers: an environment of verifiers, where an agent program calls the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mobula.actors.environments.adapters.agent_environment import AgentEnvironment
from mobula.actors.environments.programs.verifiers_process import VerifiersProcess


class Verifiers(AgentEnvironment):
    """`env` is a configuration of verifiers; the Python at `python` loads it once for each process.

    An episode is a rollout of one of the first `max_tasks` tasks of the taskset, with the rewards of the rubric.
    The process of verifiers serves all episodes of this process, and ends with it.

    Raises:
        ValueError: verifiers or the environment cannot be loaded, or there are too few tasks.

    Source: verifiers 0.4.0, `verifiers/v1/env.py` and `clients/eval.py`.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, Any],
        python: str,
        max_turns: int,
        max_tasks: int,
        num_validation: int,
        num_test: int,
        import_path: Sequence[str] = (),
        is_deterministic: bool = False,
    ) -> None:
        super().__init__(
            VerifiersProcess.shared(python, env, import_path=import_path, max_tasks=max_tasks),
            max_turns=max_turns,
            num_validation=num_validation,
            num_test=num_test,
            is_deterministic=is_deterministic,
        )
