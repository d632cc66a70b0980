"""Sampler, learner and plain diffusers agree for every family of flow models, and plain transformers for Janus; one of
them in every run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from flow_run import FlowRun, janus_config
from one_learner import saved
from peft import PeftModel
from transformers import JanusForConditionalGeneration

from benchmarks.conformance.flow.measure import measure
from benchmarks.conformance.flow.table import failures
from mobula.learner.policies.flow.tiny import TINY_FLOW
from mobula.learner.policy_weights import export_state

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]

USUAL = "wan"
NOT_MEASURED = (USUAL, "sd3_glyphs", "flux-kontext-letters")
OTHERS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in TINY_FLOW if name not in NOT_MEASURED]


@pytest.mark.parametrize("name", [USUAL, *OTHERS])
def test_a_family_conforms(tmp_path: Path, name: str) -> None:
    report = measure(name, tmp_path)
    assert failures(report) == []
    assert report.frames[0] == (5 if name in ("wan", "wan2.2", "wan-i2v", "cosmos2.5") else 1)
    assert report.num_parameters < 1_000_000


@pytest.mark.exhaustive
async def test_janus_conforms(tmp_path: Path) -> None:
    """Adapters on a tiny Janus: replay, a push proven by the canary, resume, and the same image in transformers."""
    words = ("policy.lora.rank=4", "policy.lora.alpha=8", "weight_sync.payload=adapters", "learner.learning_rate=0.05")
    run = await FlowRun(janus_config(tmp_path, *words)).start()
    [prompt] = run.prompts(1)
    before = await run.actor.prompt_logprobs(prompt)
    assert (await run.step(1))["logprob_gap_max"] < 1e-5
    after, expected = await run.actor.prompt_logprobs(prompt), run.learner.sequence_logprobs(prompt)
    assert np.abs(after - before).max() > 1e-3 > 10 * np.abs(after - expected).max()
    saved(run.learner, tmp_path / "state")
    again = FlowRun(run.config, writes=False)
    again.learner.connect("")
    again.learner.load(tmp_path / "state")
    np.testing.assert_array_equal(again.learner.sequence_logprobs(prompt), expected)
    export_state(run.config, tmp_path / "state", tmp_path / "adapter", merge=False, average=False)
    [group] = await run.groups([prompt], 1, temperature=0.0)
    plain = JanusForConditionalGeneration.from_pretrained(tmp_path / "model")
    model = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().eval()
    ids = torch.from_numpy(prompt.expanded_ids).long()[None]
    guidance = run.config.sampler.image_tokens.guidance
    drawn = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_mode="image", do_sample=False, guidance_scale=guidance
    )
    assert group.trajectories[0].actions.token_ids.tolist() == drawn[0].tolist()
