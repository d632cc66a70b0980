"""Engines that serve several adapters sample each of them, and the base model, as the merged policy does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from adapter_rows import Adapters, sample, tokens, write_adapters
from engines import Engine, Model, gaps, open_model, start_actor

from mobula.cluster.errors import ManifestError
from mobula.cluster.records.trajectory import FinishReason
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.core, pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = ("first", "second")
ROUNDING = 1e-4  # of float32, through factors that change log-probs by about 1
SERVING = ("sampler.adapters.max_served=3", "sampler.adapters.max_in_batch=2", "sampler.adapters.max_rank=8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("served") / "model", seed=0), *SERVING)


@pytest.fixture(scope="module")
def adapters(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return write_adapters(model, NAMES, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module", params=[pytest.param("vllm", marks=pytest.mark.exhaustive), "huggingface"])
def engine(request: pytest.FixtureRequest, model: Model, adapters: Adapters, local_ray: str) -> Iterator[Engine]:
    engine = start_actor(model, request.param, 0)

    async def begin() -> None:
        await engine.client.start()
        for name in NAMES:
            await engine.client.serve(name, adapters.folders[name])

    asyncio.run(begin())
    yield engine
    asyncio.run(engine.close())


async def test_adapters_and_base_in_one_batch_are_each_as_alone_and_as_the_merged_policy(
    engine: Engine, model: Model, adapters: Adapters
) -> None:
    calls = [(prompt, name) for prompt in model.prompts for name in (None, *NAMES)]
    together = await asyncio.gather(*(sample(engine, prompt, name) for prompt, name in calls))
    for (prompt, name), group in zip(calls, together, strict=True):
        assert gaps(adapters.learners[name], model, [group]).max() < ROUNDING, name
        assert tokens(await sample(engine, prompt, name)) == tokens(group)
        others = [learner for other, learner in adapters.learners.items() if other != name]
        assert min(gaps(other, model, [group]).max() for other in others) > 0.02


async def test_prompt_logprobs_are_the_learners(engine: Engine, model: Model, adapters: Adapters) -> None:
    calls = [(prompt, name) for prompt in model.prompts for name in adapters.learners]
    found = await asyncio.gather(*(engine.client.score_prompt(prompt, name, 3) for prompt, name in calls))
    for (prompt, name), scores in zip(calls, found, strict=True):
        own = np.ones(prompt.num_tokens, dtype=bool)  # a placeholder of an image is no token
        for span in prompt.media_spans:
            own[span.start : span.end] = False
        expected = adapters.learners[name].sequence_logprobs(prompt)
        np.testing.assert_allclose(scores.logprobs[own[1:]], expected[own[1:]], atol=2e-5, rtol=0)
        assert len(scores.top) == prompt.num_tokens - 1
        for token, logprob, row in zip(prompt.expanded_ids[1:].tolist(), scores.logprobs, scores.top, strict=True):
            values = [value for _, value in row]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert dict(row).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
            assert token in dict(row) or logprob <= values[-1] + 1e-5


async def test_a_name_that_is_served_again_gets_nothing_from_an_old_prefix_cache(
    engine: Engine, model: Model, adapters: Adapters, tmp_path: Path
) -> None:
    """The engine keeps the KV of the prompt, which fills several blocks, under the old weights."""
    ids = np.tile(model.prompts[0].expanded_ids, 8)
    assert len(ids) > 2 * model.config.sampler.vllm.block_size
    prompt = replace(model.prompts[0], compact_ids=ids, expanded_ids=ids)
    newer = [write_adapters(model, ["version"], tmp_path / str(seed), first_seed=seed) for seed in (11, 12)]
    for version in newer:
        await engine.client.serve("version", version.folders["version"])
        for _ in range(2):  # the second time from the cache
            group = await sample(engine, prompt, "version")
            assert gaps(version.learners["version"], model, [group]).max() < ROUNDING
        await engine.client.withdraw("version")
    with pytest.raises(ValueError, match="adapter 'version' is not served"):
        await sample(engine, prompt, "version")
    assert gaps(adapters.learners["first"], model, [await sample(engine, prompt, "first")]).max() < ROUNDING


async def test_withdrawing_ends_running_requests(
    engine: Engine, model: Model, adapters: Adapters, tmp_path: Path
) -> None:
    [folder] = write_adapters(model, ["leaving"], tmp_path, first_seed=21).folders.values()
    await engine.client.serve("leaving", folder)
    running = asyncio.ensure_future(sample(engine, model.prompts[0], "leaving", max_tokens=200))
    await asyncio.sleep(0.2)
    await engine.client.withdraw("leaving")
    group = await running
    assert {trajectory.finish_reason for trajectory in group.trajectories} <= {FinishReason.STOP, FinishReason.LENGTH}


async def test_stop_token_ids_end_a_response(engine: Engine, model: Model) -> None:
    plain = await sample(engine, model.probe, "first", max_tokens=12)
    stop = tokens(plain)[0][3]
    cut = await sample(engine, model.probe, "first", max_tokens=12, stop_token_ids=(stop,))
    for before, after in zip(plain.trajectories, cut.trajectories, strict=True):
        ids = before.actions.token_ids.tolist()
        length = ids.index(stop) + 1 if stop in ids else len(ids)
        assert after.actions.token_ids.tolist() == ids[:length]
        assert stop not in ids or after.finish_reason is FinishReason.STOP


async def test_an_adapter_that_does_not_fit_is_refused_and_the_others_are_served(
    engine: Engine, model: Model, adapters: Adapters, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"has no adapter_config\.json: export the adapter"):
        await engine.client.serve("none", tmp_path)
    with pytest.raises(ValueError, match="adapter 'first' exists: served weights never change"):
        await engine.client.serve("first", adapters.folders["second"])
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for file in adapters.folders["first"].iterdir():
        (wrong / file.name).write_bytes(file.read_bytes())
    config = wrong / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 64'))
    with pytest.raises(ValueError, match=r"rank 64, and sampler\.adapters\.max_rank=8"):
        await engine.client.serve("wrong", wrong)
    group = await sample(engine, model.probe, "first")
    assert gaps(adapters.learners["first"], model, [group]).max() < ROUNDING


async def test_pushed_weights_are_refused(engine: Engine, adapters: Adapters) -> None:
    base = adapters.learners[None]
    with pytest.raises(ManifestError, match=r"sampler\.adapters\.max_served=3 freezes the base weights"):
        await engine.client.check_manifest(base.manifest())
