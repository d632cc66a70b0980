"""The sender's part of a push: collectives of training and of the transfer group take turns, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.digests import digest
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.learner.weight_publisher import WeightPublisher

MANIFEST = Manifest(tuple(TensorSpec(f"t{n}", (4,), "float32") for n in range(5)))
BUCKET_BYTES = 32  # two tensors


class Recorder:
    """A transfer group that notes what it sends, and fails at a bucket."""

    def __init__(self, events: list[str], fails_at: int = -1) -> None:
        self._events = events
        self._fails_at = fails_at
        self.sent: list[bytes] = []

    def broadcast(self, buffer: torch.Tensor, what: str) -> None:
        if len(self.sent) == self._fails_at:
            raise WeightSyncError(f"{what} failed")
        self._events.append("sent")
        self.sent.append(buffer.numpy().tobytes())

    def close(self) -> None:
        self._events.append("closed")


def digest_of(bucket: bytes) -> bytes:
    return digest(torch.frombuffer(bytearray(bucket), dtype=torch.uint8)).numpy().tobytes()


def publisher(events: list[str], rank: int = 0) -> WeightPublisher:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for n, spec in enumerate(MANIFEST.tensors):
            events.append(spec.name)
            yield spec.name, torch.full((4,), float(n))

    cpu = torch.device("cpu")
    return WeightPublisher(MANIFEST, gathered, rank=rank, device=cpu, transport="gloo", timeout_s=5.0)


def test_a_bucket_is_sent_before_the_next_one_is_gathered() -> None:
    events: list[str] = []
    sender, group = publisher(events), Recorder(events)
    sender._groups[1] = group  # type: ignore[assignment]
    sender.send(BUCKET_BYTES, 1)
    assert events == ["t0", "t1", "sent", "t2", "t3", "sent", "t4", "sent", "sent"]
    *buckets, digests = group.sent
    assert b"".join(buckets) == np.repeat(np.arange(5, dtype=np.float32), 4).tobytes()
    assert digests == b"".join(digest_of(bucket) for bucket in buckets)


def test_a_sender_whose_group_fails_gathers_to_the_end_and_leaves() -> None:
    """The other ranks wait for it in every bucket."""
    events: list[str] = []
    sender = publisher(events)
    sender._groups[1] = Recorder(events, fails_at=1)  # type: ignore[assignment]
    with pytest.raises(WeightSyncError, match=r"weight bucket 1 \(32 bytes\) failed"):
        sender.send(BUCKET_BYTES, 1)
    assert events == ["t0", "t1", "sent", "t2", "t3", "closed", "t4"]


def test_every_rank_exports_as_many_buckets_and_rank_0_alone_their_bytes() -> None:
    exported = publisher([]).export(BUCKET_BYTES)
    buckets = [bucket[:-8].tobytes() for bucket in exported]
    assert b"".join(buckets) == np.repeat(np.arange(5, dtype=np.float32), 4).tobytes()
    assert [len(bucket) for bucket in buckets] == [32, 32, 16]
    assert [bucket[-8:].tobytes() for bucket in exported] == [digest_of(bucket) for bucket in buckets]
    events: list[str] = []
    assert [bucket.nbytes for bucket in publisher(events, rank=1).export(BUCKET_BYTES)] == [0, 0, 0]
    assert events == ["t0", "t1", "t2", "t3", "t4"], "it takes part in the gathering"
