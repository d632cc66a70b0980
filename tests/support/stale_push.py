"""A push of which one row is stale when it arrives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from engines import LocalSender
from one_learner import copied

from mobula.cluster.weight_sync.changes import VersionStep
from mobula.cluster.weight_sync.manifest import Bucket
from mobula.cluster.weight_sync.transport import TransferGroup, pack
from mobula.learner.learner import Learner


@dataclass(frozen=True)
class Stale:
    """One row of a tensor (one number of a vector) that keeps its value of before on the way."""

    name: str
    row: int
    before: torch.Tensor

    def packed(self, bucket: Bucket, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        tensor = tensors[self.name].clone()
        assert not torch.equal(tensor[self.row], self.before[self.row])
        tensor[self.row] = self.before[self.row]
        return pack(bucket, tensors | {self.name: tensor}, torch.empty(bucket.num_bytes, dtype=torch.uint8))


class StaleOnTheWay(LocalSender):
    """A sender of whose first push one row goes out stale."""

    def __init__(self, learner: Learner, stale: Stale, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(learner)
        self._stale = stale
        self._monkeypatch = monkeypatch

    async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
        buckets = list(self.learner.manifest().buckets(bucket_bytes))
        [index] = [n for n, b in enumerate(buckets) if any(slot.spec.name == self._stale.name for slot in b.slots)]
        broadcast, tensors = TransferGroup.broadcast, copied(self.learner)

        def stale_broadcast(group: TransferGroup, buffer: torch.Tensor, what: str) -> None:
            is_meant = what.startswith(f"weight bucket {index} ")
            broadcast(group, self._stale.packed(buckets[index], tensors) if is_meant else buffer, what)

        with self._monkeypatch.context() as patch:
            patch.setattr(TransferGroup, "broadcast", stale_broadcast)
            await super().send_weights(bucket_bytes, epoch, step)
