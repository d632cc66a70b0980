"""The gate in front of a model type that no conformance run covers: a note, or a refusal with the measured gap."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from family_prompts import family_prompts

from mobula.cluster.errors import CanaryError
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.weight_sync.tolerance import Tolerance
from mobula.deploy.wiring.parity_gate import ParityGate
from mobula.learner.policies.families import family_at
from mobula.learner.policies.tiny import write_tiny
from mobula.learner.policies.tiny.llava import write_tiny_llava


class Scores:
    """Engine or learner: log-probs of -1, and `off` at the last token of a prompt with two images."""

    def __init__(self, off: float = 0.0) -> None:
        self._off = off
        self.num_asked = 0

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray:
        self.num_asked += 1
        logprobs = np.full(prompt.num_tokens - 1, -1.0, dtype=np.float32)
        logprobs[-1] += self._off if len(prompt.media) == 2 else 0.0
        return logprobs

    prompt_logprobs = sequence_logprobs


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> dict[str, Prompt]:
    folder = write_tiny_llava(tmp_path_factory.mktemp("tiny") / "model")
    assert family_at(str(folder)).needs_gate
    cases = family_prompts(folder, folder.parent).cases
    return {name: cases[name].prompt for name in ("text", "one image", "two images")}


async def test_agreement_passes_once_with_a_note(prompts: dict[str, Prompt], caplog) -> None:
    learner, engine = Scores(), Scores(1e-6)
    gate = ParityGate("llava", learner, lambda: [engine], prompts, Tolerance(1e-4, 0.0))
    with caplog.at_level(logging.INFO):
        await gate(0)
        await gate(0)
    assert (learner.num_asked, engine.num_asked) == (3, 3)
    assert (
        "llava trains because engine and learner agree (text: 0 nat in the mean, 0 at most, one image: 0" in caplog.text
    )


@pytest.mark.parametrize("off", [0.03, np.nan])
async def test_a_gap_is_refused_with_its_size(prompts: dict[str, Prompt], off: float) -> None:
    gate = ParityGate("llava", Scores(), lambda: [Scores(off)], prompts, Tolerance(1e-4, 0.0))
    with pytest.raises(CanaryError, match=rf"model type llava.*two images: .* {off:.3g} at most.*cannot be trained"):
        await gate(0)


async def test_a_measured_family_is_not_compared(tmp_path: Path) -> None:
    folder = write_tiny("qwen3", tmp_path / "model")
    assert not family_at(str(folder)).needs_gate
    learner = Scores()
    await ParityGate("qwen3", learner, lambda: [Scores(1.0)], {}, Tolerance(1e-4, 0.0))(0)
    assert learner.num_asked == 0
