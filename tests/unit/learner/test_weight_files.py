"""Weights written tensor by tensor are the files of `save_pretrained`, byte for byte, and none may be missing."""

import json
from pathlib import Path

import pytest
import torch
from learner_data import random_groups, tiny_config
from torch import Tensor
from transformers import AutoTokenizer

from mobula.learner.learner import Learner
from mobula.learner.policies.checkpoint.writing import write_weights
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny

STATE = {
    "b": torch.randn(3, 5),
    "a": torch.randn(7).bfloat16(),
    "steps": torch.arange(4),
    "half": torch.randn(2, 2).half(),
    "one": torch.tensor(2.5),
    "transposed": torch.randn(4, 6).T,
}


def described(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}


@pytest.mark.parametrize("size", ["50GB", "100KB"])
def test_the_files_are_those_of_save_pretrained(tmp_path: Path, size: str) -> None:
    folder = write_tiny("qwen2.5-vl", tmp_path / "model", seed=0, tie_word_embeddings=False)
    model = load_model(str(folder), torch.float32, "sdpa").bfloat16()
    model.model.language_model.norm.float()
    model.save_pretrained(tmp_path / "expected", max_shard_size=size, save_original_format=False)
    state = model.state_dict()
    (tmp_path / "out").mkdir()
    write_weights(tmp_path / "out", "model", described(state), reversed(state.items()), size)
    files = sorted(tmp_path.glob("expected/*.safetensors"))
    assert (len(files) > 1) == (size == "100KB")
    assert [file.name for file in files] == sorted(file.name for file in tmp_path.glob("out/*.safetensors"))
    assert all((tmp_path / "out" / file.name).read_bytes() == file.read_bytes() for file in files)
    if size == "100KB":
        expected, found = (
            json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("expected", "out")
        )
        assert found == expected


def test_every_dtype_is_read_back(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save

    write_weights(tmp_path, "model", described(STATE), STATE.items(), "50GB")
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items()) and found.keys() == STATE.keys()
    whole = save({name: tensor.contiguous() for name, tensor in STATE.items()}, metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == whole


def test_a_tensor_that_never_came_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks 1 tensors, such as one"):
        write_weights(tmp_path, "model", described(STATE), [i for i in STATE.items() if i[0] != "one"], "50GB")


def test_an_export_that_fails_gathers_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for this one in every gather."""
    folder = write_tiny("qwen2.5-vl", tmp_path / "model", seed=0, tie_word_embeddings=False)
    learner = Learner(tiny_config(folder), 0, 1, ())
    learner.connect("")
    gathered = []
    whole = learner._backend.full_state
    monkeypatch.setattr(learner._backend, "full_state", lambda: (gathered.append(n) or (n, t) for n, t in whole()))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        learner.export(tmp_path / "file")
    assert len(gathered) == len(dict(whole()))
    learner.update(random_groups(AutoTokenizer.from_pretrained(folder), 3, 2), 1)
