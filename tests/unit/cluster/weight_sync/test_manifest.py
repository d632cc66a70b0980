"""The manifest: what a push carries, in which buckets, and every way in which it may not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mobula.cluster.errors import ManifestError, PreflightError
from mobula.cluster.weight_sync.manifest import (
    ALIGNMENT_BYTES,
    Manifest,
    TensorSpec,
    checkpoint_files,
    checkpoint_manifest,
)

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
    save_file(
        {"z": torch.zeros(2, 3), "a": torch.zeros(4)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"}
    )
    save_file({"m": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    write_index(tmp_path, z="model-1.safetensors", a="model-1.safetensors", m="model-2.safetensors")
    found = checkpoint_manifest(tmp_path, "bfloat16")
    assert found == Manifest(
        (TensorSpec("a", (4,), "bfloat16"), TensorSpec("m", (1,), "bfloat16"), TensorSpec("z", (2, 3), "bfloat16"))
    )


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
