"""DeepSpeed compiles nothing when a rank starts, also where ninja and a compiler are installed."""

from __future__ import annotations

import pytest
import torch
from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder.builder import OpBuilder

from mobula.learner.backends.deepspeed import _imported


def test_no_collective_in_shared_memory_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    _imported(torch.device("cpu"))
    monkeypatch.setattr(OpBuilder, "load", lambda self, verbose=True: pytest.fail(f"{self.NAME} is compiled"))
    assert build_shm_op() is None
