"""RankGroup: processes that hold one model together, as one object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mobula.cluster.errors import DeadlineError, PlacementError, WorkerDiedError
from mobula.cluster.runtime.concurrency import outcomes
from mobula.cluster.runtime.ray_actors import answer, beside, kill, stop
from mobula.cluster.runtime.vitals import Vitals
from mobula.configs.schema import TimeoutsConfig
from mobula.learner.ranks.process_group import is_peer_lost

CAUSE_S = 2.0  # that a rank which the others miss has to say what happened to it


class RankGroup:
    """Calls the handles of workers, one a rank, which meet in one process group.

    A call goes to all ranks at once, and rank 0's answer counts; the first rank that fails ends the wait for all.
    """

    def __init__(self, spawn: Callable[[], Sequence[Any]], timeouts: TimeoutsConfig, role: str) -> None:
        """`spawn()` starts the process of every rank and returns the handles; another time it may have to look for a
        place first, and block. Errors call a rank `ROLE/INDEX`.
        """
        self.role = role
        self._spawn = spawn
        self._workers: Sequence[Any] = spawn()
        self._timeouts = timeouts
        self.is_started = False
        self.num_calls = 0  # of all ranks together, under way
        self.vitals: dict[int, Vitals] = {}  # of each rank's newest sign of life

    @property
    def workers(self) -> Sequence[Any]:
        return self._workers

    async def start(self) -> None:
        """Load the model on every rank and bring the ranks together."""
        timeout_s = self._timeouts.start_s
        address = await answer(
            self._workers[0].rendezvous_address.remote(), timeout_s=timeout_s, what=f"{self.role}/0 to name its address"
        )
        await self._all([w.connect.remote(address) for w in self._workers], timeout_s, "to connect")
        self.is_started = True

    async def respawn(self) -> None:
        """End every rank at once, whatever it does, and start all of them again.

        Raises:
            WorkerDiedError: there is no place for them now.
        """
        self.is_started = False
        self.vitals.clear()
        for worker in self._workers:
            kill(worker)
        try:
            self._workers = await asyncio.to_thread(self._spawn)
        except PlacementError as error:
            raise WorkerDiedError(f"the {self.role} has no place: {error}") from error
        await self.start()

    async def offload(self, part: str) -> None:
        calls = [w.offload.remote(part) for w in self._workers]
        await self._all(calls, self._timeouts.update_s, f"to move its {part} to the host")

    async def onload(self) -> None:
        calls = [w.onload.remote() for w in self._workers]
        await self._all(calls, self._timeouts.update_s, "to move back to its device")

    async def save(self, folder: Path) -> None:
        """Take a copy of the state and begin to write it; `finish_save` waits for that."""
        calls = [w.save.remote(folder) for w in self._workers]
        await self._all(calls, self._timeouts.checkpoint_s, f"to copy its state for {folder}")

    async def finish_save(self) -> bool:
        """Wait until every rank has written the copy that it has, if it has one."""
        calls = [beside(w.finish_save).remote() for w in self._workers]
        await self._all(calls, self._timeouts.checkpoint_s, "to write the copy of its state")
        return True

    async def load(self, folder: Path) -> int:
        """Go on from a saved state; returns its version."""
        calls = [w.load.remote(folder) for w in self._workers]
        version: int = await self._all(calls, self._timeouts.checkpoint_s, f"to load {folder}")
        return version

    async def close(self) -> None:
        """End every rank; each gets `timeouts.stop_s` to do it in good order."""
        await asyncio.gather(
            *(stop(w, timeout_s=self._timeouts.stop_s, what=f"{self.role}/{n}") for n, w in enumerate(self._workers))
        )

    async def _all(self, calls: Sequence[Any], timeout_s: float, what: str) -> Any:
        """Raises: WorkerDiedError: a rank died, or others noticed that before Ray did."""
        self.num_calls += 1
        try:
            answers = await asyncio.gather(
                *(answer(call, timeout_s=timeout_s, what=f"{self.role}/{n} {what}") for n, call in enumerate(calls))
            )
        except Exception as error:
            if not is_peer_lost(error):
                raise
            await self._raise_cause(calls, what)
            raise WorkerDiedError(f"a {self.role} rank was lost to the others, which were {what}: {error}") from error
        finally:
            self.num_calls -= 1
        return answers[0] if answers else None

    async def _raise_cause(self, calls: Sequence[Any], what: str) -> None:
        """Some ranks miss another one: raise what happened to that one, if it is known within `CAUSE_S`."""
        waits = (answer(call, timeout_s=CAUSE_S, what=f"{self.role}/{n} {what}") for n, call in enumerate(calls))
        for outcome in await outcomes(*waits):
            if isinstance(outcome, Exception) and not isinstance(outcome, DeadlineError) and not is_peer_lost(outcome):
                raise outcome
