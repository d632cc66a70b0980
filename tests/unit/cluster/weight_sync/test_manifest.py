"""Manifests and changes of a push."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mobula.cluster.errors import ManifestError, PreflightError, WeightSyncError
from mobula.cluster.weight_sync import shared_ring
from mobula.cluster.weight_sync.changes import Base, PushedChanges, VersionStep, apply, message, words_of
from mobula.cluster.weight_sync.manifest import (
    ALIGNMENT_BYTES,
    Manifest,
    TensorSpec,
    checkpoint_files,
    checkpoint_manifest,
)
from mobula.cluster.weight_sync.transport import TransferGroup
from mobula.learner.weight_publisher import WeightPublisher

A = TensorSpec("a", (2, 3), "float32")

B = TensorSpec("b", (4,), "bfloat16")

C = TensorSpec("c", (2, 3), "float32")

specs = st.builds(
    TensorSpec,
    name=st.integers(min_value=0).map(str),
    shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)


def test_bytes_are_those_of_the_elements() -> None:
    assert (A.num_bytes, B.num_bytes, TensorSpec("scalar", (), "float32").num_bytes) == (24, 8, 4)
    assert Manifest((A, B)).num_bytes == 32


def test_the_same_tensors_fit_in_any_order() -> None:
    Manifest((A, B, C)).check_against(Manifest((C, A, B)))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ((A, B), "missing c"),
        ((A, B, C, TensorSpec("d", (1,), "float32")), "unexpected d"),
        ((A, replace(B, name="bb"), C), "missing b; unexpected bb"),
        ((replace(A, shape=(3, 2)), B, C), r"a is float32\[3, 2\] but float32\[2, 3\] is expected"),
        ((replace(A, dtype="bfloat16"), B, C), r"a is bfloat16\[2, 3\] but float32\[2, 3\] is expected"),
        ((A, B, C, A), "some name occurs twice"),
        ((), "missing a; missing b; missing c"),
    ],
)
def test_what_does_not_fit_is_named(sent: tuple[TensorSpec, ...], message: str) -> None:
    with pytest.raises(ManifestError, match=f"{message}.*No byte was sent"):
        Manifest(sent).check_against(Manifest((A, B, C)))


def test_a_long_list_of_problems_is_cut() -> None:
    expected = Manifest(tuple(TensorSpec(f"t{n:02d}", (1,), "float32") for n in range(20)))
    with pytest.raises(ManifestError, match=r"missing t07; and 12 more\. No byte"):
        Manifest(()).check_against(expected)


@given(st.lists(specs, max_size=20, unique_by=lambda spec: spec.name), st.integers(1, 4000))
def test_buckets_hold_every_tensor_once_in_order_aligned_and_apart(tensors: list[TensorSpec], max_bytes: int) -> None:
    buckets = list(Manifest(tuple(tensors)).buckets(max_bytes))
    assert [slot.spec for bucket in buckets for slot in bucket.slots] == tensors
    for bucket in buckets:
        assert bucket.num_bytes <= max_bytes or len(bucket.slots) == 1
        end = 0
        for slot in bucket.slots:
            assert slot.offset % ALIGNMENT_BYTES == 0
            assert slot.offset >= end
            end = slot.offset + slot.spec.num_bytes
        assert end == bucket.num_bytes


@given(st.lists(specs, max_size=5))
def test_a_manifest_survives_a_serializer_of_json_alone(tensors: list[TensorSpec]) -> None:
    manifest = Manifest(tuple(tensors))
    assert Manifest.from_wire(json.loads(json.dumps(manifest.to_wire()))) == manifest


def write_index(folder: Path, **files: str) -> None:
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_checkpoint_promises_what_its_files_hold_in_the_dtype_of_the_run(tmp_path: Path) -> None:
    tensors = {"z": torch.zeros(2, 3), "a": torch.zeros(4)}
    save_file(tensors, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"m": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    write_index(tmp_path, z="model-1.safetensors", a="model-1.safetensors", m="model-2.safetensors")
    found = checkpoint_manifest(tmp_path, "bfloat16")
    shapes = {"a": (4,), "m": (1,), "z": (2, 3)}
    assert found == Manifest(tuple(TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items()))


@pytest.mark.parametrize("name", ["model.safetensors", "diffusion_pytorch_model.safetensors"])
def test_files_beside_the_model_are_no_part_of_it(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / name)
    for other in ("consolidated", "adapter_model", "model-00001-of-00002", "diffusion_pytorch_model.fp16"):
        save_file({"b": torch.zeros(4)}, tmp_path / f"{other}.safetensors")
    assert checkpoint_files(tmp_path) == [tmp_path / name]
    assert [spec.name for spec in checkpoint_manifest(tmp_path, "float32").tensors] == ["a"]


def test_shards_are_those_of_the_index_and_all_are_there(tmp_path: Path) -> None:
    write_index(tmp_path, a="model-1.safetensors", b="model-2.safetensors")
    for shard in (1, 3):  # the third is of an earlier save
        save_file({"a": torch.zeros(4)}, tmp_path / f"model-{shard}.safetensors")
    with pytest.raises(PreflightError, match=r"index\.json names model-2\.safetensors and 0 more files .*: download"):
        checkpoint_files(tmp_path)
    save_file({"b": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    assert [file.name for file in checkpoint_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(PreflightError, match="is no index of weights"):
        checkpoint_files(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="holds no safetensors file.*: download or write"):
        checkpoint_manifest(tmp_path, "float32")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:17],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"\xff" * len(content),
        lambda content: content[:8] + b"?" + content[9:],
    ],
    ids=["empty", "no length", "half a header", "a byte less", "a byte more", "endless header", "no JSON"],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / "model-1.safetensors")
    file = tmp_path / "model-2.safetensors"
    write_index(tmp_path, a="model-1.safetensors", b="model-2.safetensors")
    save_file({"b": torch.zeros(4)}, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(PreflightError, match=r"model-2\.safetensors is no whole safetensors file .*: download"):
        checkpoint_manifest(tmp_path, "float32")


CPU = torch.device("cpu")

BUCKET_BYTES = 1 << 16

SHAPES = {"norm": (7,), "scalar": (), "q": (130, 64), "embedding": (1100, 1024), "bias": (33,), "head": (300, 257)}


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([torch.int16, torch.int32]), st.integers(0, 70_000), st.floats(0, 1), st.integers(0, 2**31))
def test_a_message_restores_every_bit_in_fewer_bytes(
    kind: torch.dtype, num_elements: int, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(-(2**15), 2**15, (num_elements,), generator=generator).to(kind)
    now = base.clone()
    is_changed = torch.rand(num_elements, generator=generator) < share**4  # most shares are small
    now[is_changed] ^= 1
    sent = message(now, base)
    restored = base.clone()
    apply(sent.header, sent.data, restored)
    assert torch.equal(restored, now)
    assert sent.num_changed == int(is_changed.sum())
    assert sent.data.numel() <= now.nbytes
    if not is_changed.any():
        assert sent.data.numel() == 0


@pytest.mark.parametrize(
    ("positions", "num_bytes"),
    [
        ((0,), 3),
        ((254,), 3),
        ((255,), 3),
        ((256,), 4),  # a gap of 16 bits
        ((65_535,), 4),
        ((65_536,), 8),  # divided
        ((199_999,), 16),
        ((3, 259, 199_999), 24),
        (tuple(range(0, 200_000, 300)), 667 * 4),
        (tuple(range(0, 200_000, 100)), 2000 * 3),
    ],
)
def test_gaps_of_every_size_are_counted_in_the_narrower_width(positions: tuple[int, ...], num_bytes: int) -> None:
    base = torch.zeros(200_000, dtype=torch.int16)
    now = base.index_fill(0, torch.tensor(positions), 7)
    sent = message(now, base)
    apply(sent.header, sent.data, base)
    assert torch.equal(base, now)
    assert sent.data.numel() == num_bytes


def test_signs_of_zero_and_payloads_of_nan_are_changes() -> None:
    before = torch.tensor([0.0, float("nan"), 1.0])
    after = before.clone()
    after[0] = -0.0
    after.view(torch.int32)[1] ^= 1
    spec = TensorSpec("w", (3,), "float32")
    sent = message(words_of(after, spec), words_of(before, spec))
    assert sent.num_changed == 2
    apply(sent.header, sent.data, words_of(before, spec))
    assert torch.equal(before.view(torch.int32), after.view(torch.int32))


def together(*calls: Callable[[], object]) -> list:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


class Pushes:
    """Learner ranks in threads with float32 weights, a wire of `dtype`, and receivers that hold parameters."""

    def __init__(self, dtype: str, num_senders: int = 1, num_receivers: int = 2) -> None:
        self.manifest = Manifest(tuple(TensorSpec(name, shape, dtype) for name, shape in SHAPES.items()), "delta")
        generator = torch.Generator().manual_seed(0)
        self.master = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        self.held = [Base(self._empty()) for _ in range(num_receivers)]
        self.senders = [self._publisher(rank, num_senders) for rank in range(num_senders)]
        self.epoch = 0
        self.meet()

    def _publisher(self, rank: int, num_senders: int) -> WeightPublisher:
        return WeightPublisher(
            self.manifest, lambda: iter(self.master.items()), rank=rank, device=CPU, transport="gloo", timeout_s=20.0,
            num_ranks=num_senders, num_senders=num_senders,
        )  # fmt: skip

    def _empty(self) -> dict[str, torch.Tensor]:
        return {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in self.manifest.tensors}

    def restart_learner(self) -> None:
        self.close()
        self.senders = [self._publisher(rank, len(self.senders)) for rank in range(len(self.senders))]
        self.meet()

    def restart_receiver(self, number: int) -> None:
        self.held[number] = Base(self._empty())

    def meet(self) -> None:
        self.epoch += 1
        at = self.senders[0].open_transfer(self.epoch, len(self.held))
        joins = [lambda sender=sender: sender.join_transfer(at) for sender in self.senders]
        members = [lambda rank=rank: TransferGroup(at, rank, CPU) for rank in range(1, 1 + len(self.held))]
        self.groups: list[TransferGroup] = together(*joins, *members)[len(self.senders) :]

    def change(self, share: float, seed: int, scale: float = 1e-2) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.master.values():
            mask = torch.rand(tensor.shape, generator=generator) < share
            tensor += mask * scale * torch.randn(tensor.shape, generator=generator)

    def push(self, version: int, base_version: int | None, *, is_last: bool = True) -> PushedChanges:
        step, manifest = VersionStep(version, base_version, is_last), replace(self.manifest, base_version=base_version)
        sends = [lambda s=sender: s.send_changes(BUCKET_BYTES, self.epoch, step) for sender in self.senders]
        receives = [
            lambda g=group, b=base: g.receive_changes(manifest, BUCKET_BYTES, b, version)
            for group, base in zip(self.groups, self.held, strict=True)
        ]
        return PushedChanges.total(together(*receives, *sends)[len(receives) :])

    def assert_equal(self) -> None:
        for base in self.held:
            for spec in self.manifest.tensors:
                ours = words_of(self.master[spec.name], spec)
                assert torch.equal(words_of(base.tensors[spec.name], spec), ours), spec.name

    def close(self) -> None:
        for member in (*self.senders, *self.groups):
            member.close()


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize(
    ("dtype", "num_senders", "same_host"),
    [("bfloat16", 1, "memory"), ("bfloat16", 2, "network"), ("float32", 2, "memory")],
)
def test_a_hundred_pushes_leave_all_bit_equal(
    dtype: str, num_senders: int, same_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if same_host == "network":
        monkeypatch.setattr(shared_ring, "host_name", lambda: "")
    pushes, whole = Pushes(dtype, num_senders), 0
    shares = random.Random(0)
    for version in range(100):
        share = shares.choice([0.0, 1e-5, 0.01, 0.05, 0.9])
        pushes.change(share, version, scale=shares.choice([1e-5, 1.0]))
        sent = pushes.push(version, version - 1 if version else None)
        pushes.assert_equal()
        whole += version > 0 and sent.num_bytes >= pushes.manifest.num_bytes
        if share == 0.0 and version:
            assert (sent.num_bytes, sent.num_changed) == (8 * 3 * len(SHAPES), 0), "only headers travel"
    assert whole < 100
    pushes.close()


def test_two_waves_get_the_changes_since_the_same_version() -> None:
    pushes = Pushes("bfloat16")
    pushes.push(0, None)
    pushes.change(0.01, seed=1)
    second_wave = [copy.deepcopy(base) for base in pushes.held]
    first = pushes.push(1, 0, is_last=False)
    pushes.assert_equal()
    pushes.held = second_wave
    assert pushes.push(1, 0) == first
    pushes.assert_equal()
    pushes.close()


def test_a_learner_that_was_restarted_sends_whole_tensors() -> None:
    pushes = Pushes("bfloat16")
    pushes.push(0, None)
    pushes.restart_learner()
    pushes.change(0.01, seed=1)
    assert pushes.push(1, 0).num_bytes >= pushes.manifest.num_bytes
    pushes.assert_equal()
    pushes.change(0.01, seed=2)
    assert pushes.push(2, 1).num_bytes < pushes.manifest.num_bytes / 10
    pushes.assert_equal()
    pushes.close()


def test_a_receiver_without_the_base_version_refuses_before_it_changes_anything() -> None:
    pushes = Pushes("bfloat16", num_receivers=1)
    pushes.push(2, None)
    before = copy.deepcopy(pushes.held[0])
    pushes.change(0.01, seed=1)
    with pytest.raises(WeightSyncError, match="changes since version 3, and this engine has version 2: it needs whole"):
        pushes.push(4, 3)
    assert pushes.held[0].version == 2
    assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in pushes.held[0].tensors.items())
    with pytest.raises(WeightSyncError, match="this engine has no whole version"):
        Base().check(3)
    Base().check(None)


def test_a_receiver_whose_tensor_differs_names_it_and_has_no_version() -> None:
    pushes = Pushes("bfloat16", num_receivers=1)
    pushes.push(0, None)
    pushes.held[0].tensors["q"].view(torch.int16)[5, 5] ^= 1
    pushes.change(0.01, seed=1)
    with pytest.raises(WeightSyncError, match=r"1 tensors differ from the learner's after .* \(q\)"):
        pushes.push(1, 0)
    assert pushes.held[0].version is None
    pushes.meet()
    pushes.push(1, None)
    pushes.assert_equal()
    pushes.close()


@pytest.mark.parametrize("killed_at", ["the header of weight bucket 1", "the changes of weight bucket 0"])
def test_a_receiver_that_dies_within_a_push_ends_it(killed_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pushes = Pushes("bfloat16")
    pushes.push(0, None)
    begin = TransferGroup._begin

    def dying(group: TransferGroup, sender: int, buffer: torch.Tensor, what: str, timeout_s: float) -> object:
        if group is pushes.groups[0] and what.startswith(killed_at):
            raise ConnectionError("killed")
        return begin(group, sender, buffer, what, timeout_s)

    pushes.change(0.01, seed=1)
    with monkeypatch.context() as patch, pytest.raises((WeightSyncError, ConnectionError)):
        patch.setattr(TransferGroup, "_begin", dying)
        pushes.push(1, 0)
    assert [base.version for base in pushes.held] == [None, None]
    assert pushes.senders[0]._base.version is None
    pushes.restart_receiver(0)
    pushes.meet()
    pushes.push(1, 0 if pushes.held[1].version == 0 else None)
    pushes.assert_equal()
    pushes.close()


def test_payloads_of_two_kinds_are_refused_by_name() -> None:
    tensors = (TensorSpec("w", (2,), "float32"),)
    kinds: Sequence[Manifest] = (Manifest(tensors), Manifest(tensors, "delta"))
    for sent, expected in (kinds, kinds[::-1]):
        message = rf"payload {sent.payload}, and the engine was started for {expected.payload} \(weight_sync.payload\)"
        with pytest.raises(ManifestError, match=message):
            sent.check_against(expected)
