"""A flow model is trained from a configuration: sampled, scored, updated and pushed, with and without adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from diffusers import DiffusionPipeline
from flow_run import FlowRun, flow_config, redness
from safetensors.torch import load_file

from mobula.configs.load import ConfigError

LORA = ("policy.lora.rank=4", "policy.lora.alpha=8", "learner.learning_rate=0.005")


@pytest.mark.parametrize("words", [(), LORA, (*LORA, "weight_sync.payload=adapters")], ids=["full", "lora", "factors"])
async def test_steps_raise_the_reward_and_replay_is_exact(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = await FlowRun(flow_config(tmp_path, *words)).start()
    before = await rewards(run)
    for version in range(1, 7):
        metrics = await run.step(version)
        gap = metrics["logprob_gap_max"]
        assert gap == 0 if not words else gap < 1e-4, "merged adapters compute the same to rounding only"
    after = await rewards(run)
    difference = after - before
    assert difference.mean() > 3 * difference.std() / np.sqrt(difference.size), (before.mean(), after.mean())


async def rewards(run: FlowRun) -> np.ndarray:
    """[N]: of images with seeds that training does not use."""
    groups = await run.groups(run.prompts(4), 1000)
    return np.array([redness(t.response.images[0]) for group in groups for t in group.trajectories])


async def test_a_canary_proves_a_push(tmp_path: Path) -> None:
    run = await FlowRun(flow_config(tmp_path)).start()
    [prompt] = run.prompts(1)
    before = await run.actor.prompt_logprobs(prompt)
    np.testing.assert_array_equal(before, run.learner.sequence_logprobs(prompt))
    groups = await run.groups([prompt], 1)
    assert groups[0].trajectories[0].weight_versions.tolist() == [0] * 4
    await run.step(1)
    after = await run.actor.prompt_logprobs(prompt)
    np.testing.assert_array_equal(after, run.learner.sequence_logprobs(prompt))
    assert np.abs(after - before).max() > 1e-4


async def test_the_divergence_from_the_base_is_zero_at_first_and_grows(tmp_path: Path) -> None:
    run = await FlowRun(flow_config(tmp_path, *LORA, "algorithm.kl.coef=0.04")).start()
    first, second = await run.step(1), await run.step(2)
    assert first["kl"] == 0 and second["kl"] > 0


async def test_an_exported_policy_is_a_pipeline_with_the_trained_weights(tmp_path: Path) -> None:
    run = await FlowRun(flow_config(tmp_path, *LORA)).start()
    await run.step(1)
    run.learner.export(tmp_path / "policy")
    file = "transformer/diffusion_pytorch_model.safetensors"
    base, trained = load_file(tmp_path / "model" / file), load_file(tmp_path / "policy" / file)
    assert base.keys() == trained.keys()
    assert {name for name in base if not np.array_equal(base[name], trained[name])}
    expected = dict(run.learner._outgoing.merged(run.learner._backend))
    assert all(np.array_equal(expected[name].numpy(), tensor) for name, tensor in trained.items())
    DiffusionPipeline.from_pretrained(tmp_path / "policy")
    again = await FlowRun(flow_config(tmp_path, f"policy.model={tmp_path / 'policy'}")).start()
    [prompt] = run.prompts(1)
    np.testing.assert_array_equal(await again.actor.prompt_logprobs(prompt), await run.actor.prompt_logprobs(prompt))


async def test_a_saved_learner_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run = await FlowRun(flow_config(tmp_path)).start()
    await run.step(1)
    run.learner.save(tmp_path / "state")
    run.learner.finish_save()
    expected = await run.step(2)
    again = await FlowRun(flow_config(tmp_path)).start()
    assert again.learner.load(tmp_path / "state") == 1
    await again.push()
    assert await again.step(2) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("algorithm.kl.coef=0.1",), r"policy\.lora\.rank above 0"),
        (("sampler.flow.window_end=6",), "bounds of steps within the first 5 of 5"),
        (("sampler.flow.kernel=cps", "sampler.flow.window_end=5"), "within the first 4 of 5"),
        (("algorithm.entropy.bonus=0.1",), r"algorithm\.entropy\.bonus \(set algorithm\.entropy\.bonus=0\)"),
        (("resources.reference.num_workers=1",), r"set resources\.reference\.num_workers=0"),
        (("sampler.temperature=0.8",), r"set sampler\.temperature=1"),
        (("policy.freeze=[pos_embed]",), r"set policy\.freeze=\[\]"),
    ],
)
def test_what_a_flow_model_cannot_do_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flow_config(tmp_path, *words)
