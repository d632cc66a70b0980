"""The sender's part of a push: collectives of training and of the transfer group take turns, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import random_groups, tiny_config
from one_learner import connected_learner, saved

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep, digest, weights_checksum
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup
from mobula.learner import weight_publisher
from mobula.learner.learner import Learner
from mobula.learner.policy_weights import saved_checksum
from mobula.learner.weight_publisher import WeightPublisher

MANIFEST = Manifest(tuple(TensorSpec(f"t{n}", (4,), "float32") for n in range(5)))
BUCKET_BYTES = 32  # two tensors


class Recorder:
    """A transfer group that is there already; it notes what it sends, and fails at a bucket."""

    SENDER = TransferGroup.SENDER

    def __init__(self, events: list[str] | None = None, fails_at: int = -1) -> None:
        self._events = [] if events is None else events
        self._fails_at = fails_at
        self.sent: list[bytes] = []

    def __call__(self, *_: object, **__: object) -> Recorder:
        return self

    def broadcast(self, buffer: torch.Tensor, what: str) -> None:
        if len(self.sent) == self._fails_at:
            raise WeightSyncError(f"{what} failed")
        self._events.append("sent")
        self.sent.append(buffer.numpy().tobytes())

    def close(self) -> None:
        self._events.append("closed")


def join(sender: WeightPublisher | Learner, group: Recorder) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_publisher, "TransferGroup", group)
        sender.join_transfer(Rendezvous("here", 1, epoch=1, world_size=2, transport="gloo", timeout_s=1.0))


def digest_of(bucket: bytes) -> bytes:
    return digest(torch.frombuffer(bytearray(bucket), dtype=torch.uint8)).numpy().tobytes()


def publisher(events: list[str], rank: int = 0, num_ranks: int = 1) -> WeightPublisher:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for n, spec in enumerate(MANIFEST.tensors):
            events.append(spec.name)
            yield spec.name, torch.full((4,), float(n))

    cpu = torch.device("cpu")
    return WeightPublisher(
        MANIFEST, gathered, rank=rank, device=cpu, transport="gloo", timeout_s=5.0, num_ranks=num_ranks, num_senders=2
    )


def test_a_bucket_is_sent_before_the_next_one_is_gathered() -> None:
    events: list[str] = []
    sender, group = publisher(events), Recorder(events)
    join(sender, group)
    sender.send(BUCKET_BYTES, 1)
    assert events == ["t0", "t1", "sent", "t2", "t3", "sent", "t4", "sent", "sent"]
    *buckets, digests = group.sent
    assert b"".join(buckets) == np.repeat(np.arange(5, dtype=np.float32), 4).tobytes()
    assert digests == b"".join(digest_of(bucket) for bucket in buckets)


def test_two_senders_send_once_both_of_their_buckets_are_gathered() -> None:
    sent = []
    for rank in range(2):
        events: list[str] = []
        sender, group = publisher(events, rank, num_ranks=2), Recorder(events)
        join(sender, group)
        sender.send(BUCKET_BYTES, 1)
        last = ["sent", "sent"] if rank == 0 else ["sent"]  # a bucket of the last round, and digests
        assert events == ["t0", "t1", "t2", "t3", "sent", "t4", *last]
        sent.append(group.sent)
    assert b"".join((sent[0][0], sent[1][0], sent[0][1])) == np.repeat(np.arange(5, dtype=np.float32), 4).tobytes()
    assert [digests for *_, digests in sent] == [digest_of(sent[0][0]) + digest_of(sent[0][1]), digest_of(sent[1][0])]


def test_a_sender_whose_group_fails_gathers_to_the_end_and_leaves() -> None:
    """The other ranks wait for it in every bucket."""
    events: list[str] = []
    sender = publisher(events)
    join(sender, Recorder(events, fails_at=1))
    with pytest.raises(WeightSyncError, match=r"weight bucket 1 \(32 bytes\) failed"):
        sender.send(BUCKET_BYTES, 1)
    assert events == ["t0", "t1", "sent", "t2", "t3", "closed", "t4"]


def test_every_rank_exports_its_part_of_the_buckets() -> None:
    events: list[str] = []
    ranks = [publisher(events, rank, num_ranks=2).export(BUCKET_BYTES) for rank in range(2)]
    assert [[bucket.nbytes for bucket in rank] for rank in ranks] == [[40, 0, 24], [0, 40, 0]]
    assert events == 2 * ["t0", "t1", "t2", "t3", "t4"], "each takes part in gathering all of them"
    exported = [ranks[n % 2][n] for n in range(3)]
    buckets = [bucket[:-8].tobytes() for bucket in exported]
    assert b"".join(buckets) == np.repeat(np.arange(5, dtype=np.float32), 4).tobytes()
    assert [bucket[-8:].tobytes() for bucket in exported] == [digest_of(bucket) for bucket in buckets]


def test_the_checksum_of_a_push_is_that_of_its_tensors_in_any_buckets_ranks_and_payload() -> None:
    tensors = [
        (spec, int.from_bytes(digest_of(np.full(4, n, np.float32).tobytes()), "little", signed=True))
        for n, spec in enumerate(MANIFEST.tensors)
    ]
    expected = weights_checksum(tensors)
    sent = []
    for bucket_bytes, num_ranks in ((16, 1), (BUCKET_BYTES, 1), (1 << 20, 1), (BUCKET_BYTES, 2)):
        parts = []
        for rank in range(num_ranks):
            sender = publisher([], rank, num_ranks=num_ranks)
            join(sender, Recorder())
            parts.append(sender.send(bucket_bytes, 1))
        sent.append(PushedChanges.total(parts))
    changes = publisher([])
    join(changes, Recorder())
    whole = changes.send_changes(BUCKET_BYTES, 1, VersionStep(1, None, is_last=True))
    nothing = changes.send_changes(BUCKET_BYTES, 1, VersionStep(2, 1, is_last=True))
    assert [part.checksum for part in (*sent, whole, nothing)] == [expected] * 6
    assert [part.num_bytes for part in sent] == [MANIFEST.num_bytes] * 4
    assert (sent[0].num_changed, nothing.num_changed) == (None, 0)


@pytest.mark.parametrize("other", [("t1", 1), ("t0", 2)])
def test_another_name_or_value_has_another_checksum(other: tuple[str, int]) -> None:
    name, value = other
    spec = MANIFEST.tensors[0]
    assert weights_checksum([(spec, 1)]) != weights_checksum([(replace(spec, name=name), value)])
    assert weights_checksum([(spec, 1)]) != weights_checksum([(replace(spec, dtype="bfloat16"), 1)])


LORA = "policy.lora.rank=4"
PUSHES = {
    "weights": (),
    "bfloat16": ("resources.dtype=bfloat16",),
    "delta": ("weight_sync.payload=delta", "resources.dtype=bfloat16"),
    "merged": (LORA,),
    "adapters": (LORA, "weight_sync.payload=adapters"),
    "frozen": ("policy.freeze=[visual.]",),
    "average": ("learner.ema_decay=0.5",),
}


@pytest.mark.parametrize("name", PUSHES)
def test_a_checkpoint_has_the_checksum_of_its_push_alone(folder: Path, tokenizer, tmp_path: Path, name: str) -> None:
    config = tiny_config(folder, *PUSHES[name])
    learner, groups = connected_learner(config), random_groups(tokenizer, 3, 4)
    learner.begin_rl()
    join(learner, Recorder())
    pushed, checked = [], []
    for version in range(3):
        if version > 0:
            learner.update(groups, version)
        step = VersionStep(version, version - 1 if version else None, is_last=True)
        sent = learner.send_weights(1 << 16, 1, step if name == "delta" else None)
        pushed.append(f"{sent.checksum:032x}")
        checked.append(saved_checksum(config, saved(learner, tmp_path / f"{version}")))
    assert checked == pushed
    assert len(set(checked)) == 3
