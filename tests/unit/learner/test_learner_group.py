"""The ranks of a learner start, and are called at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder.builder import OpBuilder
from fakes import LocalHandle, by_value, never
from learner_data import image, prompt
from scored_rows import collated
from torch.distributed import DistBackendError, DistStoreError

from mobula.cluster.errors import DeadlineError, LostObjectError, WorkerDiedError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.configs.load import load_config
from mobula.configs.schema import TimeoutsConfig
from mobula.learner import learner_group
from mobula.learner.backends.deepspeed import _imported
from mobula.learner.examples import Planners
from mobula.learner.learner_group import LearnerGroup
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.families import family_at, vision
from mobula.learner.policies.loading import load_model
from mobula.learner.shares import ELSEWHERE, GROUPS, ROWS, UnplannedShareError

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
