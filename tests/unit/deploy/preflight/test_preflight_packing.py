"""Packed rows are refused before the start for a model whose layers run through them."""

from pathlib import Path

import pytest

from mobula.actors.processors.make import make_processor
from mobula.cluster.records.media import MediaReader
from mobula.configs.load import load_config
from mobula.deploy.preflight.checks import check_packing
from mobula.deploy.preflight.loaded import LoadedModel
from mobula.learner.policies.tiny import write_tiny


@pytest.mark.parametrize(
    ("name", "packing", "found"), [("qwen3.5", True, 1), ("qwen3.5", False, 0), ("qwen3", True, 0)]
)
def test_a_model_with_a_state_takes_no_packed_rows(tmp_path: Path, name: str, packing: bool, found: int) -> None:
    folder = write_tiny(name, tmp_path / "model", seed=0)
    words = ["experiment=own", f"policy.model={folder}", "data.path=none", f"learner.packing={str(packing).lower()}"]
    config = load_config(words)
    loaded = LoadedModel(folder, None, make_processor(config, MediaReader(timeout_s=1, max_items=1)), None)
    findings = [str(finding) for finding in check_packing(config, loaded)]
    assert len(findings) == found
    assert all("qwen3_5" in text and "set learner.packing=false" in text for text in findings)
    shared = config.learner.model_copy(update={"packing": False, "sequence_parallel": 2})
    findings = [str(found) for found in check_packing(config.model_copy(update={"learner": shared}), loaded)]
    assert [("set learner.sequence_parallel=1" in text) for text in findings] == [True] * (name == "qwen3.5")
