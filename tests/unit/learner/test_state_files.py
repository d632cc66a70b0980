"""States in a folder: what is written holds no pickle, states of earlier versions are read, and no file runs code."""

from __future__ import annotations

import json
import math
import multiprocessing
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fakes import Code
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mobula.cluster.errors import CheckpointError
from mobula.configs.load import load_config
from mobula.learner.adapters.adapter import read_adapter_state
from mobula.learner.backends.deepspeed import TAG, DeepSpeedBackend, saved_zero_weights
from mobula.learner.backends.native import SingleBackend
from mobula.learner.backends.sharded import (
    ShardedWriter,
    load_sharded,
    saved_shapes,
    saved_sharded_weights,
    saved_tensors,
)
from mobula.learner.optim import read_average
from mobula.learner.policies.base import Policy
from mobula.learner.policies.checkpoint import content
from mobula.learner.rank import load_random_state
from mobula.learner.state_files import EARLIER_INDEX, INDEX, is_complete, read_state, write_state

RECORDED = Path(__file__).parents[2] / "support" / "recorded_states"  # by torch 2.13 and DeepSpeed 0.19.8


class Half(Policy):
    """The model of the recorded states: of two layers one is read."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.model = nn.ModuleDict({name: nn.Linear(4, 6) for name in names or ("used", "idle")})


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """The file that `Code` would write."""
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists()


def stepped(*names: str) -> tuple[Policy, torch.optim.Optimizer]:
    config = load_config(["experiment=digits", "learner=single", "resources.learner.num_workers=1"]).learner
    backend = SingleBackend(torch.device("cpu"), torch.float32, config)
    policy = backend.wrap(Half(*names))
    optimizer = backend.optimizer()
    backend.backward(policy.get_submodule("model.used")(torch.ones(1, 4)).sum(), is_last=True)
    backend.step(optimizer, max_grad_norm=1.0)
    return policy, optimizer


def test_a_state_is_safetensors_and_json_alone(tmp_path: Path) -> None:
    policy, optimizer = stepped()
    ShardedWriter().save(tmp_path, policy, optimizer, 3)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0.safetensors", INDEX]
    tensors = load_file(tmp_path / "rank_0.safetensors")
    assert torch.equal(tensors["model.model.used.weight@0,0"], policy.state_dict()["model.used.weight"])
    assert json.loads((tmp_path / INDEX).read_text())["values"]["version"] == 3
    other, fresh = stepped()
    fresh.param_groups[0]["lr"] = 7.0
    assert load_sharded(tmp_path, other, fresh) == 3
    assert fresh.param_groups == [
        {**group, "params": own["params"]}
        for group, own in zip(optimizer.param_groups, fresh.param_groups, strict=True)
    ]


def test_it_resumes_with_the_state_of_the_others(tmp_path: Path) -> None:
    """Of two layers one is read, so that the optimizer has a state for one."""
    policy, optimizer = stepped()
    assert len(optimizer.state) == 2, "weight and bias of the layer that is read"
    ShardedWriter().save(tmp_path, policy, optimizer, 3)()
    other, fresh = stepped()
    fresh.state.clear()
    assert load_sharded(tmp_path, other, fresh) == 3
    for name, tensor in policy.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    used, idle = (other.get_parameter(f"model.{name}.weight") for name in ("used", "idle"))
    expected = optimizer.state[policy.get_parameter("model.used.weight")]["exp_avg"]
    assert torch.equal(fresh.state[used]["exp_avg"], expected)
    assert fresh.state[used]["step"] == 1 and fresh.state[idle]["step"] == 0


def test_a_weight_that_is_missing_is_still_an_error(tmp_path: Path) -> None:
    ShardedWriter().save(tmp_path, *stepped("used"), 3)()
    with pytest.raises(CheckpointError, match=r"Missing key in checkpoint state_dict: model\.model\.idle"):
        load_sharded(tmp_path, *stepped())


def test_tensors_of_each_type_and_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "scalar": torch.tensor(0.1, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(3, 5, generator=generator).T,
        "bfloat16": torch.randn(7, generator=generator).bfloat16(),
        "float8": torch.randn(4, generator=generator).to(torch.float8_e4m3fn),
        "complex": torch.randn(4, generator=generator, dtype=torch.complex64),
        "flags": torch.tensor([True, False]),
        "steps": torch.arange(3),
    }
    values = {
        "lr": 0.1 + 0.2, "betas": (0.9, 0.999), "none": None, "on": True, "text": "ä", "n": 1 << 60, "inf": math.inf
    }  # fmt: skip
    write_state({**tensors, **values, "nested": {"names": ["a", "b"]}}, tmp_path, None)
    read: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    read |= {name: (0.0,) if name == "betas" else 0 for name in values} | {"nested": {"names": []}}
    read_state(read, tmp_path)
    for name, tensor in tensors.items():
        assert bytes(content(read[name])) == bytes(content(tensor)), name
    assert {name: read[name] for name in values} == values and read["nested"] == {"names": ["a", "b"]}


def test_what_a_state_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.kept of the state is \{1, 2\}, and a checkpoint holds tensors"):
        write_state({"optimizer": {"kept": {1, 2}}}, tmp_path, None)
    with pytest.raises(ValueError, match=r"w of the state has the type torch\.complex128"):
        write_state({"w": torch.zeros(1, dtype=torch.complex128)}, tmp_path, None)


def test_a_state_of_two_ranks_of_an_earlier_version_is_read_whole() -> None:
    folder = RECORDED / "fsdp2"
    expected = load_file(folder / "expected.safetensors")
    policy, optimizer = stepped()
    assert load_sharded(folder, policy, optimizer) == 3
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, expected[f"model.{name}"])
    moments = {name: value for name, value in expected.items() if name.startswith("optimizer.state.")}
    assert len(moments) == 6
    for name, moment in moments.items():
        parameter, key = name.removeprefix("optimizer.state.").rsplit(".", 1)
        assert torch.equal(optimizer.state[policy.get_parameter(parameter)][key], moment)
    weights = saved_sharded_weights(folder)
    assert weights.keys() == saved_shapes(folder).keys() == dict(policy.named_parameters()).keys()
    assert all(torch.equal(read(), expected[f"model.{name}"]) for name, read in weights.items())
    averages = {name: read() for name, read in saved_tensors(folder / "average").items()}
    assert averages and all(torch.equal(found, expected[f"average.{name}"]) for name, found in averages.items())
    found = {name: torch.empty_like(tensor) for name, tensor in averages.items()}
    read_average(folder, found, no_dist=True)
    assert all(torch.equal(found[name], averages[name]) for name in found)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_state_of_deepspeed_of_an_earlier_version_is_read_whole(stage: int) -> None:
    folder = RECORDED / f"deepspeed{stage}"
    expected = load_file(folder / "expected.safetensors")
    found = {name.removeprefix("model."): read() for name, read in saved_zero_weights(folder).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def with_entry(folder: Path, name: str, value: object) -> bytes:
    """The index of a recorded state, one entry of which is replaced by a file of torch.save."""
    index = pickle.loads((folder / EARLIER_INDEX).read_bytes())
    [place] = [place for key, place in index.storage_data.items() if key.fqn == name][:1]
    file = folder / place.relative_path
    place.offset = file.stat().st_size
    with file.open("ab") as target:
        torch.save(value, target)
    place.length = file.stat().st_size - place.offset
    return pickle.dumps(index)


def with_plan(folder: Path, code: Code) -> bytes:
    index = pickle.loads((folder / EARLIER_INDEX).read_bytes())
    index.planner_data = [code]
    return pickle.dumps(index)


def of_another_folder(folder: Path, code: Code) -> bytes:
    index = pickle.loads((folder / EARLIER_INDEX).read_bytes())
    for place in index.storage_data.values():
        place.relative_path = f"../{folder.name}/{place.relative_path}"
    return pickle.dumps(index)


def beside_an_index_of_a_rank(folder: Path, code: Code) -> bytes:
    """torch reads that one if the other cannot be read."""
    (folder / f"__0{EARLIER_INDEX}").write_bytes(pickle.dumps(code))
    return b""


PLANTED: dict[str, Callable[[Path, Code], bytes]] = {
    "index": lambda folder, code: pickle.dumps(code),
    "inside the index": with_plan,
    "index of a rank": beside_an_index_of_a_rank,
    "value": lambda folder, code: with_entry(folder, "version", code),
    "tensor": lambda folder, code: with_entry(folder, "model.model.used.weight", code),
    "another folder": of_another_folder,
}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return shutil.copytree(RECORDED / "fsdp2", tmp_path / "learner")


@pytest.mark.parametrize("kind", PLANTED)
def test_code_in_a_state_of_an_earlier_version_is_refused_and_not_run(recorded: Path, mark: Path, kind: str) -> None:
    (recorded / EARLIER_INDEX).write_bytes(PLANTED[kind](recorded, Code(mark)))
    with pytest.raises(CheckpointError, match=str(recorded)):
        load_sharded(recorded, *stepped())
    if kind != "value":  # an export reads tensors alone
        with pytest.raises(CheckpointError, match=str(recorded)):
            [read() for read in saved_sharded_weights(recorded).values()]


def test_code_in_an_average_of_an_earlier_version_is_refused(recorded: Path, mark: Path) -> None:
    (recorded / "average" / EARLIER_INDEX).write_bytes(pickle.dumps(Code(mark)))
    with pytest.raises(CheckpointError, match=r"average/\.metadata is refused: it names (_?io|builtins)\.open"):
        read_average(recorded, {"model.used.weight": torch.empty(6, 4)}, no_dist=True)


DEEPSPEED_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize("name", DEEPSPEED_FILES)
def test_code_in_a_state_of_deepspeed_is_refused_and_not_run(tmp_path: Path, mark: Path, name: str) -> None:
    folder = shutil.copytree(RECORDED / "deepspeed2", tmp_path / "learner")
    state = torch.load(folder / "state" / name, weights_only=False)
    torch.save({**state, "client_state": Code(mark)}, folder / "state" / name)
    with pytest.raises(CheckpointError, match=f"state/{name} is refused"):
        saved_zero_weights(folder)


def _resumes(rank: int, folder: Path) -> None:
    """Loads each state below `folder` with one engine, and writes beside it what came of it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=1)
    words = ["experiment=digits", "learner=deepspeed", "learner.zero_stage=2", "resources.learner.num_workers=1"]
    backend = DeepSpeedBackend(torch.device("cpu"), torch.float32, load_config(words).learner)
    backend.wrap(Half())
    optimizer = backend.optimizer()
    for state in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            said = f"version {backend.load(state, optimizer)}"
        except CheckpointError as error:
            said = str(error)
        state.with_suffix(".txt").write_text(said)
        save_file(dict(backend.full_state()), state.with_suffix(".safetensors"))
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_resume_of_deepspeed_reads_an_earlier_state_and_refuses_code_by_name(tmp_path: Path, mark: Path) -> None:
    shutil.copytree(RECORDED / "deepspeed2", tmp_path / "a_whole")
    for place, name in enumerate((*DEEPSPEED_FILES, "added.pt")):
        file = shutil.copytree(RECORDED / "deepspeed2", tmp_path / f"b_{place}") / TAG / name
        state = torch.load(RECORDED / "deepspeed2" / TAG / DEEPSPEED_FILES[place % 2], weights_only=False)
        torch.save({**state, "version": Code(mark)}, file)
    shutil.copytree(RECORDED / "deepspeed2", tmp_path / "c_pickle")
    (tmp_path / "c_pickle" / TAG / DEEPSPEED_FILES[0]).write_bytes(pickle.dumps(Code(mark)))
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_resumes, args=(tmp_path,), nprocs=1, start_method="forkserver")
    said = {file.stem: file.read_text() for file in sorted(tmp_path.glob("*.txt"))}
    assert said.pop("a_whole") == "version 3"
    for (state, message), name in zip(said.items(), (*DEEPSPEED_FILES, "added.pt", DEEPSPEED_FILES[0]), strict=True):
        assert f"{state}/{TAG}/{name} is refused" in message
    expected = load_file(RECORDED / "deepspeed2" / "expected.safetensors")
    for file in tmp_path.glob("*.safetensors"):
        weights = load_file(file)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights), file


def test_code_in_other_files_of_torch_is_refused_and_not_run(tmp_path: Path, mark: Path) -> None:
    readers = {"rng_0.pt": partial(load_random_state, rank=0), "adapter.pt": read_adapter_state}
    for name, read in readers.items():
        for save in (torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))):
            for value in (Code(mark), {"factors": [Code(mark)]}):
                save(value, tmp_path / name)
                with pytest.raises(CheckpointError, match=f"{name} is refused"):
                    read(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"rank_0.safetensors"', '"../learner/rank_0.safetensors"', "which is not a file of its folder"),
        ('"F32"', '"P32"', "P32"),
        ('"chunks"', '"parts"', "chunks"),
        ("}", "", "Expecting"),
    ],
)
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    folder = tmp_path / "learner"
    ShardedWriter().save(folder, *stepped(), 3)()
    text = (folder / INDEX).read_text()
    assert old in text
    (folder / INDEX).write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=rf"{INDEX} is refused: .*{said}"):
        load_sharded(folder, *stepped())


def test_a_truncated_file_of_tensors_is_refused(tmp_path: Path) -> None:
    ShardedWriter().save(tmp_path, *stepped(), 3)()
    file = tmp_path / "rank_0.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_sharded(tmp_path, *stepped())


def _shards(rank: int, num_ranks: int, folder: Path, out: Path) -> None:
    """Loads `folder` on these ranks, if it holds a state, and writes it to `out`."""
    torch.set_num_threads(1)
    file = f"file://{out}.rendezvous"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    policy = fully_shard(Half(), mesh=init_device_mesh("cpu", (num_ranks,)))
    assert isinstance(policy, Half)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, betas=(0.8, 0.9))
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()  # torch fills a cleared state only without gradients
    if is_complete(folder):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()
        optimizer.state.clear()
        assert load_sharded(folder, policy, optimizer) == 5
    ShardedWriter().save(out, policy, optimizer, 5)()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_state_is_the_same_behind_two_ranks_three_and_one(tmp_path: Path) -> None:
    """Weights, optimizer state and its settings, bit for bit."""
    source = tmp_path / "none"
    multiprocessing.set_forkserver_preload([__name__])  # one import for all ranks
    for num_ranks in (2, 3, 1):
        target = tmp_path / f"on-{num_ranks}"
        mp.start_processes(_shards, args=(num_ranks, source, target), nprocs=num_ranks, start_method="forkserver")
        source = target
    assert len(list((tmp_path / "on-3").glob("rank_*.safetensors"))) == 3
    states = [{name: read() for name, read in saved_tensors(tmp_path / f"on-{n}").items()} for n in (2, 3, 1)]
    assert any("exp_avg_sq" in name for name in states[0])
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items())
