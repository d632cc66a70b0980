"""The worker's end of a transfer group: a reload that fails leaves it, so that the sender does not wait."""

from __future__ import annotations

from typing import Any

import pytest

from mobula.actors.samplers.vllm.weights import MobulaWeightTransferEngine


class Group:
    """A transfer group that notes whether it was left."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_worker_whose_reload_fails_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(info: Any) -> None:
        raise ValueError("a layer refuses its weights")

    engine, group = object.__new__(MobulaWeightTransferEngine), Group()
    engine._group = group
    monkeypatch.setattr(engine, "parse_update_info", lambda info: info)
    monkeypatch.setattr(engine, "receive_weights", fail)
    with pytest.raises(ValueError, match="a layer refuses"):
        engine.update_weights({})
    assert group.is_closed and engine._group is None
