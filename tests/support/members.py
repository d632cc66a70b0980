"""A fixed set of receivers as weight sync sees it."""

from __future__ import annotations

from typing import Any


class FixedMembers:
    """Loses the members that it is asked to lose, and replaces none."""

    def __init__(self, *receivers: Any) -> None:
        self.lost: dict[str, Exception] = {}
        self.versions: dict[str, int] = {}
        self.versions_announced: list[int] = []
        self.version = -1
        self._receivers = list(receivers)

    def receivers(self) -> list[Any]:
        return list(self._receivers)

    def add(self, receiver: Any) -> None:
        self._receivers.append(receiver)

    def announced(self, version: int) -> None:
        self.versions_announced.append(version)

    def synced(self, receiver: Any, version: int) -> None:
        self.versions[receiver.name] = version

    def published(self, version: int) -> None:
        self.version = version

    def lose(self, receiver: Any, error: Exception) -> None:
        self.lost[receiver.name] = error
        self._receivers.remove(receiver)
