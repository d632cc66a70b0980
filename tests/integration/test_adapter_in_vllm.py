"""A plain vLLM engine with an exported PEFT adapter computes what the learner's merged weights do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adapter_engine import prompt_logprobs
from engines import LORA, new_learner, open_model, perturb_adapters
from PIL import Image

from mobula.actors.datasets.rows import Row
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policy_weights import export_state

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.exhaustive, pytest.mark.timeout(900)]

LANGUAGE = (*LORA, "policy.freeze=[visual.]")  # vLLM puts adapters into the language model alone


def test_log_probs_under_an_exported_adapter_are_those_of_the_merged_policy(tmp_path: Path) -> None:
    folder = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    model = open_model(folder, *LANGUAGE)
    image = tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(3).integers(0, 255, size=(56, 56, 3), dtype=np.uint8)).save(image)
    rows = [
        Row("text", "Which digit follows 3?", "4", "4"),
        Row("image", "<image>Which digit is this?", "7", "7", (image,)),
    ]
    prompts = [model.processor.prepare(row, f"0/{n}/{row.sample_id}") for n, row in enumerate(rows)]
    learner = new_learner(model, *LANGUAGE)
    before = [learner.sequence_logprobs(prompt) for prompt in prompts]
    perturb_adapters(learner, seed=1, scale=0.3)
    expected = [learner.sequence_logprobs(prompt) for prompt in prompts]
    learner.save(tmp_path / "state")
    learner.finish_save()
    export_state(learner._config, tmp_path / "state", tmp_path / "adapter", merge=False, average=False)

    asked = [
        {"ids": prompt.compact_ids.tolist(), "images": [str(p) for p in row.images]}
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    found = prompt_logprobs(folder, asked, {"trained": tmp_path / "adapter"}, tmp_path)
    for n, prompt in enumerate(prompts):
        for name, logprobs in (("base", before[n]), ("trained", expected[n])):
            ids, theirs = found[name][n]
            np.testing.assert_array_equal(ids, prompt.expanded_ids)
            own = np.ones(len(ids), dtype=bool)  # what stands behind an image's placeholder is no token
            for span in prompt.media_spans:
                own[span.start : span.end] = False
            np.testing.assert_allclose(theirs[own[1:]], logprobs[own[1:]], atol=2e-5, rtol=0, err_msg=f"{name} {n}")
        assert np.abs(expected[n] - before[n]).max() > 0.05, "the adapter changes what the policy says"
