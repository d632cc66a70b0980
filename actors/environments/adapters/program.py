"""Program: any command that calls an OpenAI-compatible endpoint, as an environment."""

from __future__ import annotations

from collections.abc import Sequence

from mobula.actors.environments.adapters.agent_environment import AgentEnvironment
from mobula.actors.environments.programs.commands import CommandPrograms


class Program(AgentEnvironment):
    """An episode is one run of `command` with one line of the JSONL file `tasks` (see `CommandPrograms`).

    Raises:
        ValueError: the tasks cannot be read, or there are too few.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        tasks: str,
        max_turns: int,
        num_validation: int,
        num_test: int,
        is_deterministic: bool = False,
    ) -> None:
        super().__init__(
            CommandPrograms(command, tasks),
            max_turns=max_turns,
            num_validation=num_validation,
            num_test=num_test,
            is_deterministic=is_deterministic,
        )
