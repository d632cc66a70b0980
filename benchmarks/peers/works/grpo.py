"""Works of GRPO: lengths of 8 and 128, a long tail, a released model, and the time until held-out 0.9."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness.stage import scratch_folder
from benchmarks.peers.rounds import Side
from benchmarks.peers.skewed import write_questions
from benchmarks.peers.works.work import (
    IN_PAIRS,
    NUM_WARMUP,
    OVERLAPPED,
    STEADY,
    SYNCHRONOUS,
    Work,
    mobula_side,
    peer_side,
)
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import ensure_data, ensure_model

SAMPLES = 8  # of a prompt
LONG_TAIL = (
    "experiment=sums",
    "data=jsonl",
    "data.path=data/long_tail",
    "data.max_prompt_tokens=64",
    "rewards=exact_match",
    "algorithm=grpo_no_kl",
    "sampler.max_tokens=256",
    "sampler.max_model_len=320",
    "sampler.temperature=1.0",
)
TAIL_START = (  # enough that lengths are those of the rows; what the answers say does not matter here
    "policy=tiny_qwen2_5",
    "warm_start.num_steps=150",
    "warm_start.batch_size=32",
    "warm_start.learning_rate=2e-3",
    "warm_start.check_interval=150",
    "warm_start.max_checks_rows=8",
)
ACCURACY, ACCURACY_STEPS = 0.9, 10  # held-out; steps between two evaluations
LEARNED_RATE, HELD_OUT = "5e-4", 200  # the digits' own learning rate; prompts of an evaluation


def grpo(
    name: str,
    words: Sequence[str],
    *,
    num_steps: int,
    synchronous: Sequence[str],
    targets: tuple[float, float],
    other: str,
    peer: str = "trl",
    prompts: int = 8,
    accuracy: float = 0.0,
    write_model: Callable[[RunConfig], object] = ensure_model,
    write_data: Callable[[RunConfig], object] = ensure_data,
) -> Work:
    """A peer's GRPO on a job of `mobula train`, which sets both sides' model, data, lengths, KL and temperature.

    `targets` are those of the overlapped and of the synchronous side. With `accuracy` both sides learn, and report the
    seconds until that held-out accuracy.
    """
    steady = (
        f"algorithm.prompts_per_step={prompts}",
        f"algorithm.samples_per_prompt={SAMPLES}",
        f"algorithm.max_concurrent_groups={2 * prompts}",
        "algorithm.drop_uniform_groups=false",
        "warm_start.num_steps=0",
        *STEADY,
    )
    own = tuple(overridden(steady, words))
    overlapped = ("resources=laptop_overlapped", "learner=single", "algorithm.max_staleness=1")

    def sides(num_steps: int) -> Sequence[Side]:
        config = load_config(own)
        write_data(config)
        write_model(config)
        asked: dict[str, object] = {
            "model": config.policy.model,
            "data": Path(config.data.path) / "train.jsonl",
            "prompts": prompts,
            "samples": SAMPLES,
            "tokens": config.sampler.max_tokens,
            "steps": num_steps + NUM_WARMUP + 1,
            "kl": config.algorithm.kl.coef,
            "temperature": config.sampler.temperature,
            "learning-rate": config.learner.learning_rate,
        }
        if accuracy:
            asked |= {
                "accuracy": accuracy,
                "held-out": Path(config.data.path) / f"{config.evaluation.split}.jsonl",
                "held-out-rows": config.evaluation.num_prompts,
                "interval": config.evaluation.interval_steps,
            }
        return (
            mobula_side(OVERLAPPED, "train", (*own, *overlapped), num_steps, num_ahead=1, accuracy=accuracy),
            mobula_side(SYNCHRONOUS, "train", (*own, *synchronous), num_steps, accuracy=accuracy),
            peer_side(peer, peer, f"{peer}_grpo", asked),
        )

    return Work(
        name,
        peer,
        num_steps,
        sides,
        dict(zip((OVERLAPPED, SYNCHRONOUS), targets, strict=True)),
        equal="checkpoint, prompts, samples and most tokens of a step, one optimizer step (AdamW), KL, temperature",
        unequal=f"overlapped trains answers one version old; {other}; {peer} pads a step's rows to the longest",
    )


def learned(name: str, *, num_steps: int, synchronous: Sequence[str]) -> Work:
    """The digits from a warm start to held-out 0.9, at a learning rate at which they are learned."""
    return grpo(
        name,
        (
            "experiment=digits",
            "policy=hf",
            "policy.model=data/models/tiny-digits-warm",
            f"learner.learning_rate={LEARNED_RATE}",
            "learner.beta2=0.999",
            f"evaluation.num_prompts={HELD_OUT}",
            f"evaluation.interval_steps={ACCURACY_STEPS}",
        ),
        num_steps=num_steps,
        synchronous=synchronous,
        targets=(1.5, 1.0),
        other=IN_PAIRS,
        prompts=32,
        accuracy=ACCURACY,
        write_model=warm_model("experiment=digits"),
    )


def long_tail(name: str, *, num_steps: int, synchronous: Sequence[str]) -> Work:
    """Text prompts whose answers have 1 to 256 tokens, a mean of about 32."""
    return grpo(
        name,
        (*LONG_TAIL, "policy=hf", "policy.model=data/models/tiny-long-tail"),
        num_steps=num_steps,
        synchronous=synchronous,
        targets=(3.0, 1.0),
        other=IN_PAIRS,
        write_model=warm_model(*LONG_TAIL, *TAIL_START),
        write_data=lambda config: write_questions(config.data.path),
    )


def warm_model(*words: str) -> Callable[[RunConfig], object]:
    """Writes the policy after the warm start of a job, where it is missing."""

    def write(config: RunConfig) -> None:
        folder = Path(config.policy.model)
        if (folder / "config.json").is_file():
            return
        steady = ("learner.learning_rate=1e-12", "learner.warmup_steps=0", "num_steps=1", "evaluation.num_prompts=8")
        with scratch_folder() as scratch:
            command = (sys.executable, "-m", "mobula.deploy.cli", "train", *words, *steady, f"folder={scratch}")
            subprocess.run([*command, "name=run", "resources=laptop", "metrics.progress=false"], check=True)
            shutil.copytree(scratch / "run" / "policy", folder)

    return write
