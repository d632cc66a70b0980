"""The works that are compared: sides, targets, and what is equal and what is not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.stage import scratch_folder
from benchmarks.long_responses import EXPERIMENT as LISTS
from benchmarks.long_responses import WARM_START
from benchmarks.peers.rounds import Side
from benchmarks.peers.skewed import write_skewed
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import ensure_data, ensure_model

ENVIRONMENTS = Path(".venv-peers")
NUM_WARMUP = 5  # steps of every run that are not counted
LEARNING_RATE = "1e-6"  # so small that lengths stay as they are
STEADY = (
    f"learner.learning_rate={LEARNING_RATE}",
    "learner.warmup_steps=0",
    "learner.schedule=constant",
    "evaluation.num_prompts=8",
    "evaluation.interval_steps=0",
    "checkpoints.interval_steps=0",
)
PROMPTS, SAMPLES = 8, 8  # of a step
PACKS, PACK_TOKENS = 5, 576  # packed rows of a step of supervised fine-tuning
OURS, OVERLAPPED, SYNCHRONOUS = "mobula", "mobula, overlapped", "mobula, synchronous"
IN_PAIRS = "two engines and two learner ranks of one thread each, in turns"
IN_TURNS = "one engine and one learner of two threads each, in turns"
PAIRS = ("resources=laptop",)
TURNS = ("resources=laptop_in_turns", "learner=single")


@dataclass(frozen=True)
class Work:
    """`sides` makes the model and the data if they are missing; `targets` has the ratio of each of our sides."""

    name: str
    peer: str  # the environment, and the last of the sides
    num_steps: int  # counted
    sides: Callable[[int], Sequence[Side]]  # of so many steps
    targets: Mapping[str, float]
    equal: str
    unequal: str


def grpo(
    name: str,
    words: Sequence[str],
    *,
    num_steps: int,
    synchronous: Sequence[str],
    target: float,
    other: str,
    write_model: Callable[[RunConfig], object] = ensure_model,
) -> Work:
    """TRL's GRPO on a job of `mobula train`, which sets both sides' model, data, lengths, KL and temperature."""
    own = (
        *words,
        f"algorithm.prompts_per_step={PROMPTS}",
        f"algorithm.samples_per_prompt={SAMPLES}",
        f"algorithm.max_concurrent_groups={2 * PROMPTS}",
        "algorithm.drop_uniform_groups=false",
        "warm_start.num_steps=0",
        *STEADY,
    )
    overlapped = ("resources=laptop_overlapped", "learner=single", "algorithm.max_staleness=1")

    def sides(num_steps: int) -> Sequence[Side]:
        config = load_config(own)
        write_model(config)
        ensure_data(config)
        asked = {
            "model": config.policy.model,
            "data": Path(config.data.path) / "train.jsonl",
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "tokens": config.sampler.max_tokens,
            "steps": num_steps + NUM_WARMUP + 1,
            "kl": config.algorithm.kl.coef,
            "temperature": config.sampler.temperature,
            "learning-rate": config.learner.learning_rate,
        }
        return (
            _mobula(OVERLAPPED, "train", (*own, *overlapped), num_steps, num_ahead=1),
            _mobula(SYNCHRONOUS, "train", (*own, *synchronous), num_steps),
            Side("trl", _with_output("trl", "trl_grpo", asked)),
        )

    return Work(
        name,
        "trl",
        num_steps,
        sides,
        {OVERLAPPED: target, SYNCHRONOUS: 1.0},
        equal="checkpoint, prompts, samples and most tokens of a step, one optimizer step (AdamW), KL, temperature",
        unequal=f"overlapped trains answers one version old; {other}; TRL pads a step's rows to the longest",
    )


def _write_list_model(config: RunConfig) -> None:
    """The tiny model after a short warm start: its responses are about as long as right ones, 20 to 250 tokens."""
    folder = Path(config.policy.model)
    if (folder / "config.json").is_file():
        return
    with scratch_folder() as scratch:
        words = (*WARM_START, "num_steps=1", "learner.learning_rate=1e-9", f"folder={scratch}", "name=run")
        command = (sys.executable, "-m", "mobula.deploy.cli", "train", f"experiment={LISTS}", *words)
        subprocess.run([*command, "metrics.progress=false"], check=True)
        shutil.copytree(scratch / "run" / "policy", folder)


def _mobula(name: str, command: str, words: Sequence[str], num_steps: int, num_ahead: int = 0) -> Side:
    steps = num_steps + NUM_WARMUP + 2 * num_ahead + 1
    start = (sys.executable, "-m", "benchmarks.peers.mobula_job", command)
    return Side(name, lambda folder: (*start, str(folder), *words, f"num_steps={steps}"), 0, num_ahead)


def sft(name: str, peer: str, script: str, policy: str, *, num_rows: int, num_steps: int) -> Work:
    """Supervised fine-tuning on skewed lengths; `num_rows` fill the packs of a step as the peer fills them."""
    own = (
        "experiment=sft",
        f"policy={policy}",
        "data.path=data/skewed",
        *TURNS,
        "learner.packing=true",
        "learner.activation_checkpointing=none",
        f"learner.tokens_per_microbatch={PACKS * PACK_TOKENS}",
        f"offline.batch_size={num_rows}",
        f"offline.max_tokens={PACK_TOKENS}",
        *STEADY,
    )

    def sides(num_steps: int) -> Sequence[Side]:
        config = load_config(own)
        ensure_model(config)
        asked = {
            "model": config.policy.model,
            "data": write_skewed(Path(config.data.path)),
            "row-tokens": PACK_TOKENS,
            "rows": PACKS,
            "steps": num_steps + NUM_WARMUP + 1,
            "learning-rate": config.learner.learning_rate,
        }
        return (_mobula(OURS, "sft", own, num_steps), Side(peer, _with_output(peer, script, asked)))

    return Work(
        name,
        peer,
        num_steps,
        sides,
        {OURS: 1.0},
        equal="checkpoint, rows, loss on the answers alone, packed rows, optimizer (AdamW), two threads",
        unequal=f"{num_rows} rows a step beside {PACKS} packs of {PACK_TOKENS} tokens, which hold as many in the mean",
    )


def dpo(name: str, *, num_rows: int, num_pairs: int, num_steps: int) -> Work:
    """DPO on pairs of answers about images, by TRL and by us; `num_rows` pairs in all, `num_pairs` a step."""
    own = (
        "experiment=dpo_digits",
        *TURNS,
        f"offline.batch_size={num_pairs}",
        *STEADY,
    )

    def sides(num_steps: int) -> Sequence[Side]:
        config = load_config(own)
        ensure_model(config)
        ensure_data(config)
        asked = {
            "model": config.policy.model,
            "data": config.data.path,
            "pairs": num_pairs,
            "rows": num_rows,
            "steps": num_steps + NUM_WARMUP + 1,
            "beta": config.offline.dpo.beta,
            "learning-rate": config.learner.learning_rate,
        }
        return (_mobula(OURS, "dpo", own, num_steps), Side("trl", _with_output("trl", "trl_dpo", asked)))

    return Work(
        name,
        "trl",
        num_steps,
        sides,
        {OURS: 1.0},
        equal="checkpoint, pairs of a step, beta, reference model, one optimizer step (AdamW) a batch",
        unequal="TRL computes the reference in its trainer, we in a process beside it; TRL counts line ends too",
    )


def _with_output(peer: str, script: str, asked: Mapping[str, object]) -> Callable[[Path], Sequence[str]]:
    """The command of a peer's script, which writes below the folder it is given."""
    words = (str(ENVIRONMENTS / peer / "bin" / "python"), "-m", f"benchmarks.peers.{script}")
    return lambda folder: (*words, *(f"--{key}={value}" for key, value in asked.items()), f"--output={folder / 'out'}")


WORKS = {
    work.name: work
    for work in (
        grpo(
            "trl_grpo_digits_8",
            ("experiment=digits", "sampler.max_tokens=8"),
            num_steps=30,
            synchronous=PAIRS,
            target=1.5,
            other=IN_PAIRS,
        ),
        grpo(
            "trl_grpo_digits_128",
            ("experiment=digits", "sampler.max_tokens=128"),
            num_steps=15,
            synchronous=PAIRS,
            target=1.5,
            other=IN_PAIRS,
        ),
        grpo(
            "trl_grpo_long_tail",
            (f"experiment={LISTS}", "policy=hf", "policy.model=data/models/tiny-digit-list"),
            num_steps=15,
            synchronous=PAIRS,
            target=3.0,
            other=IN_PAIRS,
            write_model=_write_list_model,
        ),
        grpo(
            "trl_grpo_sums",
            ("experiment=sums", "sampler.max_tokens=32"),
            num_steps=5,
            synchronous=TURNS,
            target=1.5,
            other=IN_TURNS,
        ),
        sft("trl_sft", "trl", "trl_sft", "tiny_qwen2_5", num_rows=34, num_steps=50),
        sft("trl_sft_smollm2", "trl", "trl_sft", "smollm2", num_rows=27, num_steps=5),
        sft("llamafactory_sft", "llamafactory", "llamafactory_sft", "tiny_qwen2_5", num_rows=34, num_steps=50),
        sft("llamafactory_sft_smollm2", "llamafactory", "llamafactory_sft", "smollm2", num_rows=27, num_steps=5),
        dpo("trl_dpo_images", num_rows=400, num_pairs=16, num_steps=20),
    )
}
