"""vLLM serves adapters of a text model's output layer, also a tied one, and scores prompts of several in a batch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from adapter_rows import peft_logprobs, sample, write_peft
from engines import TEMPERATURE, open_model, start_actor

from mobula.learner.policies.tiny import write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDING = 1e-4  # of float32, through factors that change log-probs by about 1
SERVING = ("sampler.adapters.max_served=3", "sampler.adapters.max_in_batch=2", "sampler.adapters.max_rank=8")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
async def test_samples_and_scores_of_a_mixed_batch_are_exact(local_ray: str, tmp_path: Path, is_tied: bool) -> None:
    folder = write_tiny("llama", tmp_path / "model", seed=0, tie_word_embeddings=is_tied)
    model = open_model(folder, *SERVING, sizes=[()] * 4)
    adapters: dict[str | None, Path | None] = {None: None}
    for seed, (name, modules) in enumerate({"all": ALL, "decoder": ALL[:-1], "head": ALL[-1:]}.items()):
        adapters[name] = write_peft(folder, tmp_path / name, modules, seed)
    engine = start_actor(model, "vllm", 0)
    try:
        await engine.client.start()
        for name, written in adapters.items():
            if name is not None and written is not None:
                await engine.client.serve(name, written)
        calls = [(prompt, name) for prompt in model.prompts for name in adapters]
        groups, scores = await asyncio.gather(
            asyncio.gather(*(sample(engine, prompt, name) for prompt, name in calls)),
            asyncio.gather(*(engine.client.score_prompt(prompt, name, 2) for prompt, name in calls)),
        )
    finally:
        await engine.close()
    for (prompt, name), group, found in zip(calls, groups, scores, strict=True):
        whole = peft_logprobs(folder, adapters[name], prompt.expanded_ids)  # [P, V]
        expected = np.take_along_axis(whole[:-1], prompt.expanded_ids[1:, None].astype(np.int64), 1)[:, 0]
        np.testing.assert_allclose(found.logprobs, expected, atol=ROUNDING, rtol=0, err_msg=f"prompt, {name}")
        for row, best in zip(whole[:-1], found.top, strict=True):
            assert [token for token, _ in best] == np.argsort(-row)[:2].tolist()
        for trajectory in group.trajectories:
            ids = np.concatenate([prompt.expanded_ids, trajectory.actions.token_ids])
            rows = peft_logprobs(folder, adapters[name], ids, TEMPERATURE, model.processor.media_token_ids)
            rows = rows[prompt.num_tokens - 1 : -1]
            own = np.take_along_axis(rows, trajectory.actions.token_ids[:, None].astype(np.int64), 1)[:, 0]
            found = trajectory.behavior_logprobs
            np.testing.assert_allclose(found, own, atol=ROUNDING, rtol=0, err_msg=f"sample, {name}")
