"""Log-probs, entropies, gradients and kept memory that a policy has of rows, and prompts of every family."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_data import prompt
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.records.actions import KeptSets
from mobula.cluster.records.media import MediaReader, MediaStore
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.load import load_config
from mobula.configs.schema import LearnerConfig, RunConfig
from mobula.deploy.checks.parity import MOST_VIDEOS, SOUND_RATE, Case, cases
from mobula.deploy.preflight.decisions import with_row_layout
from mobula.learner.policies.batch import TokenBatch, TokenSequence, collate
from mobula.learner.policies.families import family_at
from mobula.learner.policies.families.base import AudioFamily, VideoFamily
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.loading import load_model, recompute_blocks
from mobula.learner.policies.token import TokenPolicy

HOT = Distribution(0.7, (5, 9))

VOCABULARY = 250  # of answers


def tree(asked: Sequence[Prompt]) -> list[TokenSequence]:
    """Of each prompt three answers, one that begins like the second, and one that is the second again; not in order.

    Answers have sets of tokens that they were sampled from.
    """
    rng, rows = np.random.default_rng(0), []
    for number, one in enumerate(asked):
        answers = [rng.integers(0, VOCABULARY, size) for size in (2, 30, 1 + number)]
        answers += [np.append(answers[1][:25], rng.integers(0, VOCABULARY, 9)), answers[1]]
        rows += [TokenSequence.of_response(one, ids, kept_with(ids, rng)) for ids in answers]
    return [rows[i] for i in rng.permutation(len(rows))]


def kept_with(ids: np.ndarray, rng: np.random.Generator) -> KeptSets | None:
    """Sets for some of the tokens of an answer, or for none."""
    is_kept = rng.random((len(ids), VOCABULARY)) < 0.1
    is_kept[np.arange(len(ids)), ids] = True
    is_kept[::3] = False
    return KeptSets.of(is_kept) if len(ids) > 9 else None


def text_prompts(folder: Path) -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [prompt(tokenizer, text, text=text) for text in ("Which digit is this? " * 5, "Which number?", "Hello")]


def reader() -> MediaReader:
    return MediaReader(timeout_s=1, max_items=64)


def collated(rows: Sequence[TokenSequence]) -> TokenBatch:
    return collate(rows, reader(), torch.device("cpu"))


def policy_at(folder: Path, *overrides: str) -> TokenPolicy:
    """The model in `folder`, in the state that `from_pretrained` leaves it in; the words are for the learner."""
    return TokenPolicy(load_model(str(folder), torch.float32, "sdpa"), learner_config(*overrides))


def plain_inputs(row: TokenSequence) -> dict[str, torch.Tensor]:
    """A row as transformers' own forward takes it."""
    inputs = {"input_ids": torch.from_numpy(row.token_ids).long()[None]}
    if row.media:
        media = [handle.reference.inputs for handle in row.media]
        inputs |= {name: torch.from_numpy(np.concatenate([m[name] for m in media])) for name in media[0]}
        inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        for span in row.media_spans:
            inputs["mm_token_type_ids"][0, span.start : span.end] = 1
    return inputs


def plain_logprobs(model: PreTrainedModel, row: TokenSequence) -> torch.Tensor:
    """float32 [T], of the targets of a row: by transformers' own forward of this row alone."""
    ids = torch.from_numpy(row.token_ids).long()[None]
    logits = model(**plain_inputs(row)).logits[0, row.num_context - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, row.num_context :, None])[:, 0]


def learner_config(*overrides: str) -> LearnerConfig:
    return load_config(["experiment=digits", *overrides]).learner


def scores_of(folder: Path, batches: list[list[TokenSequence]], *overrides: str, recomputed: str = "none"):
    """Log-probs, entropies and gradients of a mean in which each token has a weight of its own."""
    policy = policy_at(folder, *overrides).train()
    recompute_blocks(policy.model, recomputed)
    outputs, num_targets = [], sum(row.num_targets for batch in batches for row in batch)
    for batch in batches:
        output = policy(collated(batch), HOT, entropy_has_gradient=True)
        loss = torch.zeros(())
        for row, sequence in enumerate(batch):
            logprobs, entropy = (part[row, : sequence.num_targets] for part in (output.logprobs, output.entropy))
            weights = torch.linspace(-1, 1, len(logprobs) + 1)[1:]
            loss = loss + ((logprobs + 0.1 * entropy) * weights).sum() / num_targets
            outputs.append((logprobs.detach(), entropy.detach()))
        loss.backward()
    return outputs, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def assert_equal(one, other, atol: float = 1e-6) -> None:
    for (logprobs, entropy), (other_logprobs, other_entropy) in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(logprobs, other_logprobs, atol=atol, rtol=1e-6)
        torch.testing.assert_close(entropy, other_entropy, atol=atol, rtol=2e-6)  # sums over the vocabulary
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], atol=atol, rtol=0)


def kept_bytes(forward: Callable[[], object], parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of all storages that autograd keeps of `forward`, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    assert result is not None
    return sum(storage.nbytes() for storage in kept.values())


def learner_of(folder: Path) -> LearnerConfig:
    """With packed rows where a run with this model packs them."""
    return with_row_layout(load_config(["experiment=digits", f"policy.model={folder}", "policy.tiny=none"])).learner


@dataclass(frozen=True)
class FamilyPrompts:
    """A checkpoint, its processor, and the prompts of the conformance suite."""

    folder: Path
    config: RunConfig
    processor: ChatProcessor
    cases: dict[str, Case]

    def own_inputs(self, name: str) -> dict[str, torch.Tensor]:
        """A case as forward() takes it, by the checkpoint's own processor."""
        case, family = self.cases[name], family_at(str(self.folder))
        hears = isinstance(family, AudioFamily)
        if not family.takes_images and not hears:
            tokenizer = AutoTokenizer.from_pretrained(self.folder)
            return dict(tokenizer(case.prompt.text, add_special_tokens=False, return_tensors="pt"))
        options = family.processor_options(str(self.folder), self.config.data) if family.takes_images else {}
        processor = AutoProcessor.from_pretrained(self.folder, **options)
        media = {"images": list(case.images)} if case.images else {}
        if case.videos:
            videos = [np.stack([np.asarray(frame) for frame in frames]) for frames in case.videos]
            media |= {"videos": videos, "do_sample_frames": False}
        if case.sounds:
            media |= {"audio": list(case.sounds), "sampling_rate": SOUND_RATE}
        made = processor(text=[case.prompt.text], return_tensors="pt", add_special_tokens=False, **media)
        unused = (*processor.unused_input_names, "num_crops", "batch_num_images", "num_audio_tokens")
        return {name: value for name, value in made.items() if name not in unused}


def model_type(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["model_type"]


def chat_of(config: RunConfig, **options: Any) -> ChatProcessor:
    store = MediaStore(lambda media: media, config.data.media_cache_bytes)
    return ChatProcessor(config.policy.model, config.data, config.sampler, store, **{"keep_files": False, **options})


def family_prompts(folder: Path, data: Path) -> FamilyPrompts:
    """Of the checkpoint in `folder`, as a run on a GPU has them; images are written to `data`."""
    family = family_at(str(folder))
    if model_type(folder) == "smolvlm":
        pytest.importorskip("num2words", reason="its processor needs mobula[smolvlm]")
    config = load_config([
        "experiment=digits", f"policy.model={folder}", "policy.tiny=none", "sampler.max_images_per_prompt=3",
        "data.max_prompt_tokens=512", "sampler.max_model_len=1024",
        f"sampler.max_audios_per_prompt={2 * isinstance(family, AudioFamily)}",
        f"sampler.max_videos_per_prompt={MOST_VIDEOS * isinstance(family, VideoFamily)}",
    ])  # fmt: skip
    processor = chat_of(config, device="cuda")
    return FamilyPrompts(folder, config, processor, cases(processor, data))
