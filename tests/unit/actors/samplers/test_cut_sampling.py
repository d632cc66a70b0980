"""Top-k, top-p, min-p, FIRE, stop strings and seeds with transformers' sampler: the learner scores what was sampled."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import image, prompt, tiny_config
from transformers import AutoTokenizer

from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.huggingface import HuggingFaceSampler, StopStrings
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.partial_response import Attempt, SampledSequence
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.checkpoint import load_policy_model
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy

TEMPERATURE, NUM_SAMPLES, NUM_TOKENS = 0.8, 6, 10
PLAIN_SETTINGS = SamplingSettings(NUM_SAMPLES, TEMPERATURE, NUM_TOKENS, seed=3)
CUTS = [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 40, "top_p": 0.7, "min_p": 0.01}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def asked(tokenizer) -> Prompt:
    return prompt(tokenizer, "p", [image(1)])


@pytest.fixture(scope="module")
def settings(folder: Path, tokenizer) -> EngineSettings:
    return EngineSettings(
        model=str(folder), dtype="float32", device="cpu", seed=0, tensor_parallel=1, max_num_seqs=8, kv_cache_bytes=1,
        sampler=tiny_config(folder, "sampler.chunk_tokens=4").sampler,
        keeps_kv_cache=False, sleep_level=0, reports_load=False,
        banned_ids=tuple(tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])),
        stop_ids=(tokenizer.eos_token_id,), pad_id=tokenizer.pad_token_id,
        expected=Manifest(()), has_unpushed=False, adapters=None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def policy(folder: Path) -> TokenPolicy:
    config = tiny_config(folder, "learner.logprob_chunk_tokens=7")
    return TokenPolicy(load_policy_model(config.policy, torch.float32), config.learner).eval()


def sample(
    settings: EngineSettings, asked: Prompt, sampling: SamplingSettings, so_far: tuple[SampledSequence, ...] = ()
) -> list[SampledSequence]:
    async def run() -> list[SampledSequence]:
        sampler = HuggingFaceSampler(settings)
        await sampler.start()
        sampler._served.set(0)
        media = [handle.reference for handle in asked.media]
        return await sampler.sample(asked, media, sampling, Attempt("a", so_far), lambda chunks, siblings: None)

    return asyncio.run(run())


@torch.no_grad()
def gaps(
    policy: TokenPolicy,
    asked: Prompt,
    found: list[SampledSequence],
    distribution: Distribution,
    *,
    replays: bool = True,
) -> list[np.ndarray]:
    """|learner - behaviour| of each token, with or without the kept sets."""
    rows = [TokenSequence.of_response(asked, s.actions.token_ids, s.actions.kept if replays else None) for s in found]
    batch = collate(rows, MediaReader(timeout_s=1, max_items=8), torch.device("cpu"))
    logprobs = policy(batch, distribution).logprobs.numpy()
    return [np.abs(own[: s.num_tokens] - s.logprobs) for own, s in zip(logprobs, found, strict=True)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_ratios_at_equal_weights_are_1_over_the_kept_sets(settings, asked, policy, cut) -> None:
    found = sample(settings, asked, replace(PLAIN_SETTINGS, **cut, keeps_sets=True))
    distribution = Distribution(TEMPERATURE, settings.banned_ids)
    assert np.concatenate(gaps(policy, asked, found, distribution)).max() < 1e-5
    without = np.concatenate(gaps(policy, asked, found, distribution, replays=False))
    assert without.max() > 0.05, "the cut is one that shows"
    counts = np.concatenate([s.actions.kept.counts for s in found])
    assert counts.min() >= 1 and counts.max() <= cut.get("top_k", 10_000)
    for sequence in found:
        ends = sequence.actions.kept.counts.cumsum()
        sets = np.split(sequence.actions.kept.ids, ends[:-1])
        assert all(token in kept for token, kept in zip(sequence.actions.token_ids, sets, strict=True))


def test_sampling_defaults_of_the_checkpoint_change_nothing(settings, folder, asked, tmp_path) -> None:
    """Penalties, cuts, bans and temperatures of generation_config.json are not the run's."""
    other = shutil.copytree(folder, tmp_path / "other")
    own = json.loads((other / "generation_config.json").read_text())
    defaults = {
        "do_sample": True, "repetition_penalty": 1.5, "temperature": 1e-6, "top_k": 2, "top_p": 0.1, "min_p": 0.9,
        "typical_p": 0.2, "epsilon_cutoff": 0.1, "no_repeat_ngram_size": 1, "bad_words_ids": [[5], [6, 7]],
        "suppress_tokens": [8, 9], "min_new_tokens": 9, "num_beams": 4, "length_penalty": 3.0,
    }  # fmt: skip
    (other / "generation_config.json").write_text(json.dumps(own | defaults))
    for sampling in (PLAIN_SETTINGS, replace(PLAIN_SETTINGS, temperature=0.0)):
        expected = sample(settings, asked, sampling)
        found = sample(replace(settings, model=str(other)), asked, sampling)
        for one, two in zip(found, expected, strict=True):
            assert np.array_equal(one.actions.token_ids, two.actions.token_ids)
            assert np.array_equal(one.logprobs, two.logprobs)


def test_rows_with_and_without_kept_sets_share_a_batch(settings, asked, policy) -> None:
    cut = sample(settings, asked, replace(PLAIN_SETTINGS, top_k=5, keeps_sets=True))
    plain = sample(settings, asked, PLAIN_SETTINGS)
    assert all(sequence.actions.kept is None for sequence in plain)
    mixed = [cut[0], plain[0], cut[1], plain[1]]
    assert np.concatenate(gaps(policy, asked, mixed, Distribution(TEMPERATURE, settings.banned_ids))).max() < 1e-5


def test_fire_heats_the_first_token_alone_and_the_learner_follows(settings, asked, policy) -> None:
    found = sample(settings, asked, replace(PLAIN_SETTINGS, first_token_temperature=5.0, top_k=20, keeps_sets=True))
    fire = Distribution(TEMPERATURE, settings.banned_ids, first_token_temperature=5.0)
    assert np.concatenate(gaps(policy, asked, found, fire)).max() < 1e-5
    regular = gaps(policy, asked, found, Distribution(TEMPERATURE, settings.banned_ids))
    assert min(row[0] for row in regular) > 1e-3, "the first token is of the hot distribution"
    assert max(row[1:].max() for row in regular if len(row) > 1) < 1e-5, "and it alone"


def test_fire_ends_with_an_eos_that_is_the_first_token(settings, asked, tokenizer) -> None:
    all_stop = replace(settings, stop_ids=tuple(range(len(tokenizer))))
    for max_tokens in (1, NUM_TOKENS):
        sampling = replace(PLAIN_SETTINGS, first_token_temperature=5.0, max_tokens=max_tokens)
        found = sample(all_stop, asked, sampling)
        assert [(s.num_tokens, s.finish_reason) for s in found] == [(1, FinishReason.STOP)] * NUM_SAMPLES
    [*short] = sample(settings, asked, replace(PLAIN_SETTINGS, first_token_temperature=5.0, max_tokens=1))
    assert {s.num_tokens for s in short} == {1}
    assert FinishReason.LENGTH in {s.finish_reason for s in short}


def test_an_interrupted_response_keeps_its_sets_and_its_hot_token(settings, asked, policy) -> None:
    sampling = replace(PLAIN_SETTINGS, first_token_temperature=5.0, top_p=0.5, keeps_sets=True)
    whole = sample(settings, asked, sampling)
    cuts = [0, 1, 2, 3, 0, 5]
    begun = tuple(s.until(min(cut, s.num_tokens - 1)) for s, cut in zip(whole, cuts, strict=True))
    found = sample(settings, asked, sampling, begun)
    for before, after in zip(begun, found, strict=True):
        assert after.actions.token_ids[: before.num_tokens].tolist() == before.actions.token_ids.tolist()
        assert after.actions.kept.counts.shape == after.actions.token_ids.shape
    fire = Distribution(TEMPERATURE, settings.banned_ids, first_token_temperature=5.0)
    assert np.concatenate(gaps(policy, asked, found, fire)).max() < 1e-5


def test_a_stop_string_may_begin_before_an_interruption(folder: Path, tokenizer) -> None:
    ids = np.array(tokenizer.encode("so it is </answer> and more"), dtype=np.int32)
    sequence = SampledSequence(
        TokenActions(ids), np.zeros(len(ids), np.float32), (WeightSpan(2, 0, len(ids)),), FinishReason.LENGTH
    )
    cut = StopStrings(str(folder), ("</answer>", "never")).cut(sequence)
    assert tokenizer.decode(cut.actions.token_ids).endswith("</answer>")
    assert cut.finish_reason is FinishReason.STOP_STRING and cut.weight_spans[-1].end == cut.num_tokens
    assert StopStrings(str(folder), ("never",)).cut(sequence) is sequence


def test_a_request_is_drawn_from_its_own_seed(settings, asked) -> None:
    first, again, other = (
        [s.actions.token_ids.tolist() for s in sample(settings, asked, PLAIN_SETTINGS.for_prompt(name))]
        for name in ("0/1/a", "0/1/a", "0/2/b")
    )
    assert first == again != other


def test_a_cancelled_response_draws_no_more(settings, asked) -> None:
    """Its thread would disturb the next response: the generator is torch's own."""

    async def run() -> None:
        sampler = HuggingFaceSampler(settings)
        await sampler.start()
        sampler._served.set(0)
        begun = asyncio.Event()
        media = [handle.reference for handle in asked.media]
        long = replace(PLAIN_SETTINGS, max_tokens=90)
        work = asyncio.create_task(
            sampler.sample(asked, media, long, Attempt("a"), lambda chunks, siblings: begun.set())
        )
        await begun.wait()
        work.cancel()
        await asyncio.wait([work])
        assert work.cancelled()
        state = torch.get_rng_state()
        await asyncio.sleep(0.1)
        assert torch.equal(state, torch.get_rng_state())

    asyncio.run(run())
