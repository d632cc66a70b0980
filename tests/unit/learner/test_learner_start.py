"""What a rank needs when it starts: DeepSpeed, shared arrays, a fitting transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder.builder import OpBuilder
from learner_data import image, prompt
from transformers import AutoTokenizer

from mobula.cluster.records.media import MediaReader
from mobula.learner.backends.deepspeed import _imported
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.families import vision
from mobula.learner.policies.families.registry import family_at
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_checked


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
