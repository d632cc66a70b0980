"""Ranks, adapters and rows that the tests of adapters on one base share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import LORA, TEMPERATURE, Engine, Model, new_learner, perturb_adapters
from learner_data import tiny_config
from one_learner import saved
from transformers import AutoModelForCausalLM

from mobula.cluster.records.trajectory import Prompt, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.training_service.interfaces import AdamParameters, AdapterSpec, LossCall, LossResult, LossRow
from mobula.learner.adapters.adapter import PartialResult
from mobula.learner.adapters.ranks import AdapterRank, FullWeightsRank
from mobula.learner.learner import Learner
from mobula.learner.policy_weights import export_state

# A large eps: at 1e-12 Adam turns the rounding of a gradient near 0 into a step as large as the learning rate.
ADAM = AdamParameters(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.01, grad_clip_norm=1.0)

SPEC = AdapterSpec(rank=4, alpha=8.0, seed=3)

OTHER = AdapterSpec(rank=2, alpha=16.0, seed=5, trains_mlp=False)


def rank_with(model: Path, *overrides: str, tokens: int = 60, **specs: AdapterSpec) -> AdapterRank:
    """The only rank, with an adapter of each name; `tokens` of a micro-batch are less than those of a call."""
    rank = AdapterRank(tiny_config(model, f"learner.tokens_per_microbatch={tokens}", *overrides), 0, 1)
    rank.connect("")
    for name, spec in specs.items():
        rank.create(name, spec)
    return rank


def text_row(ids: np.ndarray, **inputs: np.ndarray) -> LossRow:
    """A row of text whose targets are its tokens shifted by one, unless given."""
    tokens = ids[:-1].astype(np.int32)
    prompt = Prompt("p", "p", "", tokens, tokens)
    return LossRow(prompt, {"target_tokens": ids[1:].astype(np.int64), **inputs})


def weighted(ids: np.ndarray) -> LossRow:
    """A row of cross-entropy with weights of 0 and 1."""
    return text_row(ids, weights=(np.arange(len(ids) - 1) % 3 > 0).astype(np.float32))


def rows_of(seed: int, num: int = 3, longest: int = 20) -> list[LossRow]:
    rng = np.random.default_rng(seed)
    return [weighted(rng.integers(0, 250, size=rng.integers(3, longest + 1))) for _ in range(num)]


def call_of(adapter: str, seed: int, **changed: object) -> LossCall:
    return LossCall(adapter, rows_of(seed), "cross_entropy", **changed)  # type: ignore[arg-type]


def whole(part: PartialResult | Exception) -> LossResult:
    """The result of a rank that computes all rows."""
    assert isinstance(part, PartialResult), part
    return PartialResult.joined([part])


def computed(rank: AdapterRank | FullWeightsRank, call: LossCall) -> LossResult:
    [part] = rank.compute([call])
    return whole(part)


def logprobs_of(model: torch.nn.Module, row: LossRow) -> torch.Tensor:
    """float32 [T], of a row's targets by transformers' own forward."""
    logits = model(torch.from_numpy(row.prompt.expanded_ids.astype(np.int64))[None]).logits[0]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(row.inputs["target_tokens"])[:, None])[:, 0]


def factors_of(rank: AdapterRank, adapter: str) -> dict[str, torch.Tensor]:
    pairs = rank._adapters[adapter].factors.items()
    return {f"{name}.{n}": t.detach().clone() for name, pair in pairs for n, t in enumerate(pair)}


LANGUAGE = (*LORA, "policy.freeze=[visual.]")  # vLLM adapts the language model alone


@dataclass(frozen=True)
class Adapters:
    """Learners by the name of their adapter, None for the base model, and folders of the exported adapters."""

    learners: Mapping[str | None, Learner]
    folders: Mapping[str, Path]


def write_adapters(model: Model, names: Sequence[str], folder: Path, first_seed: int = 1) -> Adapters:
    """Adapters for these names, each of other random factors."""
    learners: dict[str | None, Learner] = {None: new_learner(model)}
    folders = {}
    for seed, name in enumerate(names, start=first_seed):
        learner = new_learner(model, *LANGUAGE)
        perturb_adapters(learner, seed=seed, scale=0.3)
        folders[name] = folder / name
        state = saved(learner, folder / f"{name}-state")
        export_state(learner._config, state, folders[name], merge=False, average=False)
        learners[name] = learner
    return Adapters(learners, folders)


async def sample(engine: Engine, prompt: Prompt, adapter: str | None, **own: object) -> TrajectoryGroup:
    """One group with the weights of an adapter, or of the base model for None."""
    given = {"num_samples": 4, "temperature": TEMPERATURE, "max_tokens": 8, "seed": 7, "adapter": adapter, **own}
    return await engine.generate(prompt, SamplingSettings(**given))  # type: ignore[arg-type]


def tokens(group: TrajectoryGroup) -> list[list[int]]:
    """The sampled ids of each sibling."""
    return [trajectory.actions.token_ids.tolist() for trajectory in group.trajectories]


def write_peft(model: Path, folder: Path, target_modules: Sequence[str], seed: int) -> Path:
    """An adapter of random factors on these modules, written by PEFT; any linear layer may be among them."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(_open(model), LoraConfig(r=4, lora_alpha=6, target_modules=list(target_modules)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    adapted.save_pretrained(str(folder))
    return folder


@torch.no_grad()
def peft_logprobs(
    model: Path, adapter: Path | None, ids: np.ndarray, temperature: float = 1.0, banned: Sequence[int] = ()
) -> np.ndarray:
    """Float32 [P, V], the log-probs after each token that transformers and PEFT compute."""
    from peft import PeftModel

    policy = _open(model)
    if adapter is not None:
        policy = PeftModel.from_pretrained(policy, str(adapter))
    logits = policy(input_ids=torch.from_numpy(ids).long()[None]).logits[0].float()  # [P, V]
    logits[:, list(banned)] = -torch.inf
    return (logits / temperature).log_softmax(-1).numpy()


def _open(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
