"""Runs rollouts of a verifiers environment: reads an episode as a line of JSON on stdin, writes the outcome to stdout.

Runs as a script in the Python environment of `deploy/environment.sh verifiers`, and imports no module of the project.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verifiers.v1 import Env, Episode, EvalClientConfig, ModelContext, SamplingConfig, Task
from verifiers.v1.env import RunSlot
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

KEY = "MOBULA_POLICY_KEY"  # never set: our endpoint needs no key, and must not get one of another service

LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
"""Values of `Trace.stop_condition` for truncated rollouts. A truncated answer is not a truncated rollout."""

Say = Callable[[Mapping[str, Any]], object]


async def serve(options: Mapping[str, Any], say: Say) -> None:
    """Writes the number of tasks, then runs requested tasks until stdin ends."""
    env = load_environment(resolve_env_config(options["env"]))
    tasks = list(env.taskset.take(options["max_tasks"]))
    playing: dict[str, asyncio.Task[None]] = {}
    async with env.serving():
        say({"num_tasks": len(tasks)})
        lines = await _stdin()
        while line := await lines.readline():
            asked = json.loads(line)
            name = asked["id"]
            if asked.get("is_cancelled"):
                if name in playing:
                    playing[name].cancel()
                continue
            playing[name] = asyncio.create_task(_play(env, tasks[asked["task"]], asked, say), name=name)
            playing[name].add_done_callback(lambda ended: playing.pop(ended.get_name()))
        left = list(playing.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _play(env: Env, task: Task, asked: Mapping[str, Any], say: Say) -> None:
    client = EvalClientConfig(base_url=asked["base_url"], api_key_var=KEY)
    context = ModelContext(model="policy", client=client, sampling=SamplingConfig())
    try:
        outcome = outcome_of(await env.run_slot(RunSlot(task), context))
    except Exception as error:  # the environment may raise errors of any type
        outcome = {"error": f"{type(error).__name__}: {error}"}
    say({"id": asked["id"], **outcome})


def outcome_of(episode: Episode) -> dict[str, Any]:
    """The rewards of the trained agent, or an error if there are none."""
    all_errors = [*episode.errors, *(trace.last_error for trace in episode.traces)]
    errors = [f"{error.type}: {error.message}" for error in all_errors if error is not None]
    if errors or not episode.ok:
        return {"error": "; ".join(errors) or "the episode is not ok, and says no error"}
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        names = ", ".join(trace.agent.name for trace in trained)
        return {"error": f"{len(trained)} trainable agents ({names}): one is supported, of one run"}
    [trace] = trained
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        return {"error": f"there is no reward {', '.join(unscored)}".strip()}
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return {"rewards": parts, "is_truncated": trace.stop_condition in LIMITS}


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def main() -> None:
    """Runs rollouts. The argument is JSON: `env`, a configuration of verifiers, and `max_tasks`."""
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # output of environments goes to the log, not into the protocol
    sys.path.append(str(Path(__file__).parent))  # mobula_chat
    asyncio.run(serve(json.loads(sys.argv[1]), lambda line: lines.write(f"{json.dumps(line)}\n")))


if __name__ == "__main__":
    main()
