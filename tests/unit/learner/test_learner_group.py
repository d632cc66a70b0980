"""The ranks of a learner start, and are called at once."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder.builder import OpBuilder
from learner_data import image, prompt
from torch.distributed import DistBackendError, DistStoreError
from transformers import AutoTokenizer

from mobula.cluster.errors import DeadlineError, LostObjectError, WorkerDiedError
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.configs.load import load_config
from mobula.learner.backends.deepspeed import _imported
from mobula.learner.examples import Planners
from mobula.learner.learner_group import LearnerGroup
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.families import family_at, vision
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_checked
from mobula.learner.shares import ELSEWHERE, GROUPS, ROWS, Portion, UnplannedShareError

TIMEOUTS = load_config(["experiment=digits"]).timeouts


class Answer:
    """A reference to a value, to an error, or to something that never comes."""

    def __init__(self, value: object = None, *, is_lost: bool = False) -> None:
        self._future: Future = Future()
        if isinstance(value, Exception):
            self._future.set_exception(value)
        elif not is_lost:
            self._future.set_result(value)

    def future(self) -> Future:
        return self._future


class FakeHandle:
    """A rank that answers `update` with what `reply` makes of the version it is asked for."""

    def __init__(self, reply) -> None:
        self.update = SimpleNamespace(remote=lambda groups, version: reply(version))


def by_value(groups: object) -> object:
    """In the place of the object store."""
    return groups


def report(version: int, loss: float) -> Answer:
    return Answer(UpdateReport(version, {"loss": loss}))


async def test_updates_count_versions_and_rank_zero_reports() -> None:
    group = LearnerGroup(
        lambda: [FakeHandle(lambda v: report(v, 0.5)), FakeHandle(lambda v: report(v, 9.0))], TIMEOUTS, by_value
    )
    assert await group.update([]) == UpdateReport(1, {"loss": 0.5})
    assert (await group.update([])).version == 2


async def test_the_groups_of_a_step_are_put_once_and_every_rank_gets_the_same_reference() -> None:
    put, given = [], []

    class Rank:
        def __init__(self) -> None:
            self.update = SimpleNamespace(remote=self._called)

        def _called(self, reference: object, version: int) -> Answer:
            given.append(reference)
            return report(version, 0.5)

    def store(value: object) -> str:
        put.append(value)
        return f"reference {len(put)}"

    group = LearnerGroup(lambda: [Rank() for _ in range(3)], TIMEOUTS, store)
    await group.update(["of step 1"])
    await group.update(["of step 2"])
    assert put == [["of step 1"], ["of step 2"]]
    assert given == ["reference 1"] * 3 + ["reference 2"] * 3


async def test_a_rank_gets_the_references_that_are_planned_for_it_and_more_where_it_lacks_some() -> None:
    given: list[tuple[int, list[int], bool]] = []

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.update = SimpleNamespace(remote=self._called)

        def _called(self, outlines: list[ScoredGroup], version: int, *, portion: Portion) -> Answer:
            assert all(outline.group is ELSEWHERE for outline in outlines)
            assert all(reference == (f"group {n}", None) for n, reference in portion.references.items())
            given.append((self.rank, sorted(portion.references), portion.is_final))
            return report(version, 0.5) if portion.is_final else Answer(UnplannedShareError(GROUPS, [[], [0]]))

    groups = [ScoredGroup(SimpleNamespace(), f"group {n}", ()) for n in range(3)]
    planned = lambda groups, version, num_ranks: [{0, 1}, {2}]  # noqa: E731
    group = LearnerGroup(lambda: [Rank(0), Rank(1)], TIMEOUTS, by_value, planners=Planners(planned))
    assert (await group.update(groups)).version == 1
    assert given == [(0, [0, 1], False), (1, [2], False), (0, [0, 1], True), (1, [0, 2], True)]


async def test_supervised_rows_of_a_step_are_planned_like_its_groups_and_repeated_with_them() -> None:
    given: list[tuple[int, list[int], list[int], bool]] = []

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.update = SimpleNamespace(remote=self._called)

        def _called(
            self,
            outlines: list[ScoredGroup],
            version: int,
            *,
            supervised: list[ScoredGroup],
            supervised_portion: Portion,
            portion: Portion,
        ) -> Answer:
            assert all(outline.group is ELSEWHERE for outline in [*outlines, *supervised])
            rows = supervised_portion.references
            assert [reference for reference, _ in rows.values()] == [f"row {n}" for n in rows]
            given.append((self.rank, sorted(portion.references), sorted(rows), supervised_portion.is_final))
            return report(version, 0.5) if supervised_portion.is_final else Answer(UnplannedShareError(ROWS, [[1], []]))

    class Rows:
        async def of(self, version: int) -> list[ScoredGroup]:
            return [ScoredGroup(SimpleNamespace(), f"row {n}", ()) for n in range(2)]

    groups = [ScoredGroup(SimpleNamespace(), f"group {n}", ()) for n in range(2)]
    planned = lambda groups, version, num_ranks: [{0}, {1}]  # noqa: E731
    group = LearnerGroup(lambda: [Rank(0), Rank(1)], TIMEOUTS, by_value, Rows(), Planners(planned, planned))
    assert (await group.update(groups)).version == 1
    assert given == [(0, [0], [0], False), (1, [1], [1], False), (0, [0], [0, 1], True), (1, [1], [1], True)]


async def test_a_failed_rank_ends_the_wait_for_the_others_and_makes_no_version() -> None:
    lost, failed = FakeHandle(lambda v: Answer(is_lost=True)), FakeHandle(lambda v: Answer(ValueError("rank 1 broke")))
    group = LearnerGroup(lambda: [lost, failed], TIMEOUTS, by_value)
    with pytest.raises(ValueError, match="rank 1 broke"):
        await group.update([])
    assert group.version == 0


async def test_only_groups_that_every_rank_misses_leave_the_ranks_as_they_were() -> None:
    """A rank that has got at them is in the middle of an update, and waits for the one that has not."""
    hasty = TIMEOUTS.model_copy(update={"object_s": 0.05})
    missing = FakeHandle(lambda v: Answer(LostObjectError("groups cannot be had")))
    with pytest.raises(LostObjectError):
        await LearnerGroup(lambda: [missing, missing], hasty, by_value).update([])
    for other in (Answer(is_lost=True), report(1, 0.5)):
        with pytest.raises(WorkerDiedError, match="began an update that others could not"):
            await LearnerGroup(lambda: [missing, FakeHandle(lambda v: other)], hasty, by_value).update([])  # noqa: B023


async def test_a_silent_rank_is_named_after_the_deadline() -> None:
    hasty = TIMEOUTS.model_copy(update={"update_s": 0.05})
    ranks = [FakeHandle(lambda v: report(v, 0.5)), FakeHandle(lambda v: Answer(is_lost=True))]
    group = LearnerGroup(lambda: ranks, hasty, by_value)
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
async def test_ranks_that_miss_another_one_report_it_lost_before_ray_does(error: Exception, is_lost: bool) -> None:
    """A rank whose node dies is noticed by the others at once, and by Ray after some failed health checks."""
    silent = FakeHandle(lambda v: Answer(is_lost=True))
    group = LearnerGroup(lambda: [FakeHandle(lambda v: Answer(error)), silent], TIMEOUTS, by_value)
    with pytest.raises(WorkerDiedError if is_lost else type(error)):
        await group.update([])


async def test_exported_weights_are_one_object_a_bucket() -> None:
    """An object store may be smaller than the weights, but not than one object."""
    manifest = Manifest(tuple(TensorSpec(f"t{n}", (4,), "float32") for n in range(5)))

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.manifest = SimpleNamespace(remote=lambda: Answer(manifest))
            self.export_buckets = SimpleNamespace(options=self._options)

        def _options(self, *, num_returns: int) -> SimpleNamespace:
            answers = [Answer(7), *(Answer(f"{self.rank}: bucket {n}") for n in range(num_returns - 1))]
            return SimpleNamespace(remote=lambda bucket_bytes: answers)

    group = LearnerGroup(lambda: [Rank(0), Rank(1)], TIMEOUTS, by_value)
    version, references = await group.export_weights(32)
    assert version == 7
    assert [r.future().result() for r in references] == ["0: bucket 0", "1: bucket 1", "0: bucket 2"]


def test_no_collective_in_shared_memory_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    _imported(torch.device("cpu"))
    monkeypatch.setattr(OpBuilder, "load", lambda self, verbose=True: pytest.fail(f"{self.NAME} is compiled"))
    assert build_shm_op() is None


def test_on_the_host_a_tensor_shares_the_memory_of_its_array() -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    tensor = on_device(array, torch.device("cpu"))
    array[0, 0] = 9
    assert tensor[0, 0] == 9 and tensor.dtype is torch.int64 and tensor.shape == (2, 3)


class Old(torch.nn.Module):
    def forward(self, input_ids, **kwargs):
        return input_ids


class New(torch.nn.Module):
    def forward(self, input_ids, mm_encoder_outputs=None, **kwargs):
        return input_ids


def test_the_argument_is_looked_for_by_name() -> None:
    assert not vision.takes_encoded_images(Old)
    assert vision.takes_encoded_images(New)


def test_images_are_refused_where_the_model_would_leave_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checked(tmp_path / "tiny")
    asked = prompt(AutoTokenizer.from_pretrained(folder), "0/0/a", [image(1)])
    row = TokenSequence.of_prompt(asked)
    batch = collate([row], MediaReader(timeout_s=1, max_items=2), torch.device("cpu"))
    model, family = load_model(str(folder), torch.float32, "sdpa"), family_at(str(folder))
    assert family.hidden_states(model, batch).isfinite().all()
    monkeypatch.setattr(vision, "takes_encoded_images", lambda core: False)
    with pytest.raises(ValueError, match="would leave out the images.*install transformers 5.18"):
        family.hidden_states(model, batch)
