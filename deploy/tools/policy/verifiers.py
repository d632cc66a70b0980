"""`mobula verifiers`: rollouts of a verifiers environment against an endpoint of `mobula serve-policy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from mobula.actors.environments.programs.base import Outcome
from mobula.actors.environments.programs.verifiers_process import VerifiersProcess
from mobula.cluster.errors import PreflightError
from mobula.cluster.proxies import ProxiedTransport
from mobula.configs.schema import RunConfig
from mobula.configs.schema.environment import EnvironmentConfig

SESSION_HEADER = "X-Mobula-Session"
TIMEOUT_S = 60.0  # of a call that opens or ends a session


@dataclass(frozen=True)
class VerifiersOptions:
    """The options of `verifiers`."""

    endpoint: str  # http://HOST:PORT/v1
    token: str | None
    num_tasks: int
    num_siblings: int
    num_concurrent: int


@dataclass(frozen=True)
class Played:
    """A rollout, and the trajectories that the endpoint made of its calls."""

    task: int
    outcome: Outcome
    num_trajectories: int

    @property
    def reward(self) -> float | None:
        return None if "error" in self.outcome else sum(self.outcome["rewards"].values())


def roll(config: RunConfig, options: VerifiersOptions, console: Console) -> int:
    """Play the first tasks of the taskset, each `num_siblings` times; returns the exit code.

    Each rollout is a session of the endpoint, which ends with the rewards of the rubric. A rollout that failed ends its
    session without a reward, so nothing is made of it.

    Raises:
        PreflightError: verifiers cannot be loaded, or the endpoint cannot be reached.
    """
    played = play(config.environment, options)
    _print(console, config.environment, played)
    return 0 if any(rollout.reward is not None for rollout in played) else 1


def play(environment: EnvironmentConfig, options: VerifiersOptions) -> list[Played]:
    """Every rollout in the order of tasks, `num_concurrent` at a time.

    Raises:
        PreflightError: verifiers cannot be loaded, or the endpoint cannot be reached.
    """
    if environment.name != "verifiers":
        raise PreflightError(f"environment.name={environment.name} is none of verifiers: use environment=verifiers")
    given = environment.options
    base_url = options.endpoint.rstrip("/")
    headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}
    with httpx.Client(headers=headers, timeout=TIMEOUT_S, transport=ProxiedTransport()) as client:
        [model] = _asked(client, "GET", f"{base_url}/models")["data"]
        try:
            process = VerifiersProcess(
                given["python"],
                given["env"],
                import_path=given["import_path"],
                max_tasks=given["max_tasks"],
                model=model["id"],
                key=options.token,
            )
        except (ValueError, KeyError) as error:
            raise PreflightError(f"environment.options: {error}") from error
        label = given["env"]["taskset"]["id"]

        def one(number: int) -> Played:
            task = number // options.num_siblings % process.num_tasks
            session = _asked(client, "POST", f"{base_url}/sessions", {"task": f"{label}/{task}"})["session"]
            outcome = process.play(task, base_url, {SESSION_HEADER: session})[1].result()
            rewards = outcome.get("rewards")
            body = {} if rewards is None else {"reward": sum(rewards.values()), "components": rewards}
            done = _asked(client, "POST", f"{base_url}/sessions/{session}/finish", body)
            return Played(task, outcome, done["trajectories"])

        try:
            with ThreadPoolExecutor(options.num_concurrent) as threads:
                return list(threads.map(one, range(options.num_tasks * options.num_siblings)))
        finally:
            process.close()


def _asked(client: httpx.Client, method: str, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Raises: PreflightError: there is no answer, or it is a refusal."""
    try:
        reply = client.request(method, url, json=body)
        reply.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise PreflightError(f"{url} answered {error.response.status_code}: {error.response.text[:300]}") from error
    except httpx.HTTPError as error:
        raise PreflightError(
            f"{url} cannot be reached ({type(error).__name__}: {error}): start `mobula serve-policy`, and give the URL "
            "that it says with --endpoint"
        ) from error
    return reply.json()


def _print(console: Console, environment: EnvironmentConfig, played: Sequence[Played]) -> None:
    table = Table("task", "rollouts", "failed", "mean reward", "trajectories")
    for task in sorted({rollout.task for rollout in played}):
        own = [rollout for rollout in played if rollout.task == task]
        rewards = [rollout.reward for rollout in own if rollout.reward is not None]
        mean = f"{sum(rewards) / len(rewards):.4f}" if rewards else "-"
        num_failed, num_trajectories = len(own) - len(rewards), sum(rollout.num_trajectories for rollout in own)
        table.add_row(str(task), str(len(own)), str(num_failed), mean, str(num_trajectories))
    console.print(table)
    for error in sorted({str(rollout.outcome["error"]) for rollout in played if "error" in rollout.outcome}):
        console.print(f"failed: {error}", markup=False, highlight=False)
