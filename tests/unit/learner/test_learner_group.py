"""The ranks of a learner start, are called at once, and send weights: collectives take turns, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder.builder import OpBuilder
from fakes import LocalHandle, by_value, never
from learner_data import image, prompt, random_groups, tiny_config
from one_learner import connected_learner, saved
from scored_rows import collated
from torch.distributed import DistBackendError, DistStoreError

from mobula.cluster.errors import DeadlineError, LostObjectError, WeightSyncError, WorkerDiedError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep, digest, weights_checksum
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup
from mobula.configs.load import load_config
from mobula.configs.schema import TimeoutsConfig
from mobula.learner import learner_group, weight_publisher
from mobula.learner.backends.deepspeed import _imported
from mobula.learner.examples import Planners
from mobula.learner.learner import Learner
from mobula.learner.learner_group import LearnerGroup
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.families import family_at, vision
from mobula.learner.policies.loading import load_model
from mobula.learner.policy_weights import saved_checksum
from mobula.learner.shares import ELSEWHERE, GROUPS, ROWS, UnplannedShareError
from mobula.learner.weight_publisher import WeightPublisher

TIMEOUTS = load_config(["experiment=digits"]).timeouts


class Rank:
    """A rank that answers `update` with this loss or error, if at all, and keeps what it was called with."""

    def __init__(self, answer: float | Exception | None = 0.5) -> None:
        self._answer = answer
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    async def update(self, groups: Any, version: int, **more: Any) -> UpdateReport:
        self.calls.append((groups, more))
        if self._answer is None:
            await never()
        if isinstance(self._answer, Exception):
            raise self._answer
        return UpdateReport(version, {"loss": self._answer})


def group_of(*ranks: Any, put: Callable[[Any], Any] = by_value, timeouts: TimeoutsConfig = TIMEOUTS, **more: Any):
    return LearnerGroup(lambda: [LocalHandle(rank) for rank in ranks], timeouts, put, **more)


async def test_updates_count_versions_and_rank_zero_reports() -> None:
    group = group_of(Rank(0.5), Rank(9.0))
    assert await group.update([]) == UpdateReport(1, {"loss": 0.5})
    assert (await group.update([])).version == 2


async def test_the_groups_of_a_step_are_put_once_and_every_rank_gets_the_same_reference() -> None:
    put: list[Any] = []

    def store(value: Any) -> str:
        put.append(value)
        return f"reference {len(put)}"

    ranks = [Rank() for _ in range(3)]
    group = group_of(*ranks, put=store)
    await group.update(["of step 1"])
    await group.update(["of step 2"])
    assert put == [["of step 1"], ["of step 2"]]
    assert [[groups for groups, _ in rank.calls] for rank in ranks] == [["reference 1", "reference 2"]] * 3


class Planned(Rank):
    """A rank that misses references in its first call, in which they are those of a plan."""

    def __init__(self, kind: str, missing: list[list[int]], portion: str) -> None:
        super().__init__()
        self._error = UnplannedShareError(kind, missing)
        self._portion = portion

    async def update(self, groups: Any, version: int, **more: Any) -> UpdateReport:
        assert all(outline.group is ELSEWHERE for outline in [*groups, *more.get("supervised", ())])
        report = await super().update(groups, version, **more)
        if more[self._portion].is_final:
            return report
        raise self._error

    def given(self, portion: str) -> list[tuple[list[int], bool]]:
        """The references of each call, and whether they are the last ones."""
        portions = [more[portion] for _, more in self.calls]
        return [(sorted(own.references), own.is_final) for own in portions]


def some(name: str, num: int) -> list[ScoredGroup]:
    return [ScoredGroup(SimpleNamespace(), f"{name} {n}", ()) for n in range(num)]


async def test_a_rank_gets_the_references_that_are_planned_for_it_and_more_where_it_lacks_some() -> None:
    first, second = ranks = [Planned(GROUPS, [[], [0]], "portion") for _ in range(2)]
    group = group_of(*ranks, planners=Planners(lambda groups, version, num_ranks: [{0, 1}, {2}]))
    assert (await group.update(some("group", 3))).version == 1
    assert first.given("portion") == [([0, 1], False), ([0, 1], True)]
    assert second.given("portion") == [([2], False), ([0, 2], True)]
    assert second.calls[1][1]["portion"].references == {0: ("group 0", None), 2: ("group 2", None)}


async def test_supervised_rows_of_a_step_are_planned_like_its_groups_and_repeated_with_them() -> None:
    class Rows:
        async def of(self, version: int) -> list[ScoredGroup]:
            return some("row", 2)

    def planned(groups: Any, version: int, num_ranks: int) -> list[set[int]]:
        return [{0}, {1}]

    first, second = ranks = [Planned(ROWS, [[1], []], "supervised_portion") for _ in range(2)]
    group = group_of(*ranks, supervised=Rows(), planners=Planners(planned, planned))
    assert (await group.update(some("group", 2))).version == 1
    assert [[places for places, _ in rank.given("portion")] for rank in ranks] == [[[0], [0]], [[1], [1]]]
    assert first.given("supervised_portion") == [([0], False), ([0, 1], True)]
    assert second.given("supervised_portion") == [([1], False), ([1], True)]
    assert first.calls[1][1]["supervised_portion"].references == {0: ("row 0", None), 1: ("row 1", None)}


async def test_a_failed_rank_ends_the_wait_for_the_others_and_makes_no_version() -> None:
    group = group_of(Rank(None), Rank(ValueError("rank 1 broke")))
    with pytest.raises(ValueError, match="rank 1 broke"):
        await group.update([])
    assert group.version == 0


async def test_only_groups_that_every_rank_misses_leave_the_ranks_as_they_were() -> None:
    """A rank that has got at them is in the middle of an update, and waits for the one that has not."""
    hasty = TIMEOUTS.model_copy(update={"object_s": 0.05})
    missing = Rank(LostObjectError("groups cannot be had"))
    with pytest.raises(LostObjectError):
        await group_of(missing, missing, timeouts=hasty).update([])
    for other in (None, 0.5):
        with pytest.raises(WorkerDiedError, match="began an update that others could not"):
            await group_of(missing, Rank(other), timeouts=hasty).update([])


async def test_a_silent_rank_is_named_after_the_deadline() -> None:
    group = group_of(Rank(), Rank(None), timeouts=TIMEOUTS.model_copy(update={"update_s": 0.05}))
    with pytest.raises(DeadlineError, match="learner/1 to make version 1"):
        await group.update([])


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4994"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(GLOO), True),
        (DistStoreError("wait timeout after 5000ms, keys: /learner/0//cpu//0/1"), True),
        (DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(GLOO), False),
    ],
)
async def test_ranks_that_miss_another_one_report_it_lost_before_ray_does(
    error: Exception, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose node dies is noticed by the others at once, and by Ray after some failed health checks."""
    monkeypatch.setattr(learner_group, "CAUSE_S", 0.05)
    with pytest.raises(WorkerDiedError if is_lost else type(error)):
        await group_of(Rank(error), Rank(None)).update([])


async def test_exported_weights_are_one_object_a_bucket() -> None:
    """An object store may be smaller than the weights, but not than one object."""

    class Exporting:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def manifest(self) -> Manifest:
            return Manifest(tuple(TensorSpec(f"t{n}", (4,), "float32") for n in range(5)))

        def export_buckets(self, bucket_bytes: int) -> tuple[Any, ...]:
            return 7, *(f"{self._rank}: bucket {n}" for n in range(3))

    version, references = await group_of(Exporting(0), Exporting(1)).export_weights(32)
    assert version == 7
    assert [await r.future() for r in references] == ["0: bucket 0", "1: bucket 1", "0: bucket 2"]


def test_no_collective_in_shared_memory_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    _imported(torch.device("cpu"))
    monkeypatch.setattr(OpBuilder, "load", lambda self, verbose=True: pytest.fail(f"{self.NAME} is compiled"))
    assert build_shm_op() is None


def test_on_the_host_a_tensor_shares_the_memory_of_its_array() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    tensor = on_device(array, torch.device("cpu"))
    array[0, 0] = 9
    assert tensor[0, 0] == 9 and tensor.dtype is torch.int64 and tensor.shape == (2, 3)


def test_the_argument_is_looked_for_by_name() -> None:
    class Old(torch.nn.Module):
        def forward(self, input_ids, **kwargs): ...

    class New(torch.nn.Module):
        def forward(self, input_ids, mm_encoder_outputs=None, **kwargs): ...

    assert [vision.takes_encoded_images(kind) for kind in (Old, New)] == [False, True]


def test_images_are_refused_where_the_model_would_leave_them_out(folder: Path, tokenizer, monkeypatch) -> None:
    batch = collated([TokenSequence.of_prompt(prompt(tokenizer, "0/0/a", [image(1)]))])
    model, family = load_model(str(folder), torch.float32, "sdpa"), family_at(str(folder))
    assert family.hidden_states(model, batch).isfinite().all()
    monkeypatch.setattr(vision, "takes_encoded_images", lambda core: False)
    with pytest.raises(ValueError, match="would leave out the images.*install transformers 5.18"):
        family.hidden_states(model, batch)


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
