"""Output that only informs may fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mobula.cluster.metrics.files import write_atomically
from mobula.cluster.metrics.informing import informing


def test_a_full_disk_is_logged_and_the_error_that_ends_a_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(KeyError, match="what ended the run"):
        try:
            raise KeyError("what ended the run")
        finally:
            with informing("the summary"):
                write_atomically(tmp_path / "summary.json", "{}")
    assert "the summary could not be written; the run goes on without it" in caplog.text
    assert list(tmp_path.iterdir()) == [], "no draft is left"
