"""Small tasksets of verifiers, for tests of its real environments in its own Python."""

from __future__ import annotations

from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[2] / ".venv-verifiers" / "bin" / "python"
NEEDS_VERIFIERS = pytest.mark.skipif(not PYTHON.exists(), reason="verifiers has no environment here: `make verifiers`")
TASKSET = '''
import asyncio
import verifiers.v1 as vf

__all__ = ["Letters", "TwoRounds"]


class LettersData(vf.TaskData):
    letter: str = ""


class LettersTask(vf.Task[LettersData, vf.State]):
    @vf.reward
    async def has_letter(self, task, trace) -> float:
        if task.letter == "c":
            raise RuntimeError("this task cannot be scored")
        if task.letter == "d":
            await asyncio.sleep(600)
        return float(task.letter in trace.last_reply)

    @vf.reward(weight=0.5)
    async def is_short(self, task, trace) -> float:
        return float(len(trace.last_reply) < 4)


class Letters(vf.Taskset[LettersTask]):
    def load(self):
        for letter in "abcdef":
            data = LettersData(prompt=f"Say {letter}.", system_prompt="Be brief.", letter=letter)
            yield LettersTask(data, self.config.task)


class TwoRoundsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    forgets: bool = False


class TwoRounds(vf.Env[TwoRoundsConfig]):
    """Asks twice, the second time with what was said at first; with `forgets`, without it."""

    async def run(self, task, agents):
        if self.config.forgets:
            await agents.agent.run(task)
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as talk:
            first = await talk.turn()
            if not first.terminated:
                await talk.turn(f"That has {len(first.last_reply)} letters. Again.")
'''

TOOL_TASKSET = '''
import verifiers.v1 as vf

__all__ = ["Abacus"]


class AbacusTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b


class AbacusData(vf.TaskData):
    answer: str = ""


class AbacusTask(vf.Task[AbacusData, vf.State]):
    @classmethod
    def toolsets(cls, config):
        return [AbacusTools(vf.ToolsetConfig())]

    @vf.reward
    async def is_right(self, task, trace) -> float:
        return float(task.answer == trace.last_reply)


class Abacus(vf.Taskset[AbacusTask]):
    def load(self):
        for a in range(4):
            yield AbacusTask(AbacusData(prompt=f"{a} + 4?", answer=str(a + 4)), self.config.task)


if __name__ == "__main__":
    AbacusTools.run()
'''


def write_tasksets(folder: Path) -> Path:
    """Write `mobula_letters` and `mobula_abacus`; returns the folder, for `environment.options.import_path`."""
    (folder / "mobula_letters.py").write_text(TASKSET)
    (folder / "mobula_abacus.py").write_text(TOOL_TASKSET)
    return folder
