"""The table of planted faults: overrides of a short run, and the checks of which one must report each fault.

    export PYTHONPATH=tests/support
    python tests/support/planted/planted_faults.py FOLDER [NAME...]   # makes the runs that FOLDER lacks, and diagnoses
    python tests/support/planted/planted_faults.py FOLDER --table     # prints the table of docs

A run that FOLDER holds is not made again, so runs may be made by several calls.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from local_run import LocalRun, write_done

from mobula.cluster.errors import MobulaError
from mobula.cluster.metrics.report.run_folder import RunFinding, RunVerdict
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.report.diagnose.command import diagnose, subject_of

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent.relative_to(ROOT)
PARTS, DATA = f"{HERE}/planted_parts.py", f"{HERE}/planted_data.py"
NUM_STEPS = 20
SERIOUS = (RunVerdict.FAULT, RunVerdict.WARNING)
ALONE = (
    "resources=laptop", "learner=single", "resources.learner.num_workers=1", "resources.rollout.num_workers=1",
    f"num_steps={NUM_STEPS}", "replay.trajectory_log=true",
)  # fmt: skip
EIGHT_PROMPTS = ("algorithm.prompts_per_step=8", "algorithm.max_concurrent_groups=16")
DIGITS = ("experiment=digits", *ALONE, "sampler=huggingface", *EIGHT_PROMPTS)
GLYPHS = ("experiment=glyphs_grpo", *ALONE, "warm_start.num_steps=200", "algorithm.prompts_per_step=4")


@dataclass(frozen=True)
class PlantedRun:
    """A run with a fault, or a healthy one. `checks` are the checks of which one must give a fault or a warning; a
    healthy run has none and must not have a fault. `refused` says that the configuration is checked before a run."""

    name: str
    title: str
    words: tuple[str, ...]
    checks: tuple[str, ...] = ()
    refused: bool = False


def own_data(fault: str) -> tuple[str, ...]:
    """Overrides that write the digits with a fault to a folder of their own."""
    return (f"data.writer={DATA}:write", f"data.writer_options={{fault: {fault}}}", f"data.path=FOLDER/data/{fault}")


def own_reward(name: str) -> str:
    return f"rewards.components=[{{name: accuracy, function: '{PARTS}:{name}', weight: 1.0}}]"


def digits(name: str, title: str, words: Sequence[str], *checks: str) -> PlantedRun:
    return PlantedRun(name, title, (*DIGITS, *words), checks)


FAULTS: tuple[PlantedRun, ...] = (
    digits("wrong_label_column", "the label is the column of the id", ["data.columns={answer: id}"],
           "answers_and_labels", "reward_parser"),
    digits("reward_never_parses", "the reward reads JSON, and answers are boxes",
           ["rewards=exact_match", "rewards.components.0.options.extract=json:answer"], "reward_parser"),
    digits("answers_cut", "sampler.max_tokens cuts the answer", ["sampler.max_tokens=2"], "truncation"),
    digits("one_token", "sampler.max_tokens=1", ["sampler.max_tokens=1"], "truncation", "end_of_text"),
    digits("rate_too_small", "learning rate 100 times too small", ["learner.learning_rate=5e-6"], "learning_rate"),
    digits("rate_too_large", "learning rate 100 times too large", ["learner.learning_rate=5e-2"], "learning_rate"),
    digits("endless_warm_up", "a warm-up of 100,000 steps", ["learner.warmup_steps=100000"], "learning_rate"),
    PlantedRun("stale_engine", "engines confirm pushes and keep their weights",
               ("experiment=digits", *ALONE, *EIGHT_PROMPTS, f"sampler.kind={PARTS}:StaleSampler",
                "supervision.on_logprob_gap=warn", "weight_sync.canary_interval=0"), ("engine_weights", "logprob_gap")),
    digits("shuffled_pictures", "pictures belong to other rows", own_data("shuffled_pictures"), "answers_and_labels"),
    digits("blank_pictures", "pictures are grey", own_data("blank_pictures"), "pictures"),
    digits("one_picture", "all rows show one picture", own_data("one_picture"), "pictures"),
    digits("noise_labels", "labels belong to other rows", own_data("noise_labels"), "answers_and_labels"),
    digits("frozen_decoder", "the decoder is frozen", ["policy.freeze=[language]"], "frozen_parts"),
    digits("kl_of_10", "algorithm.kl.coef=10", ["algorithm.kl.coef=10"], "kl_weight"),
    digits("too_easy", "every row has the same answer", own_data("too_easy"), "uniform_groups", "label_distribution"),
    digits("too_hard", "an untrained policy without a warm start", ["warm_start=none"],
           "uniform_groups", "reward_parser"),
    digits("duplicates", "each training row ten times", own_data("duplicates"), "duplicate_prompts"),
    digits("leak", "a third of the test split is training rows", own_data("leak"), "held_out_leak"),
    digits("pays_length", "the reward is the length", [own_reward("pays_length")], "reward_and_length"),
    PlantedRun("pays_a_loophole", "the reward pays for the digit 1; a judge without a weight",
               (*DIGITS, "rewards.components=[{name: reward, function: '" + PARTS + ":pays_one', weight: 1.0}, "
                "{name: accuracy, function: math_answer, weight: 0.0, options: {require_boxed: true}}]"),
               ("reward_exploitation", "reward_components")),
    digits("cold_sampling", "sampler.temperature=0.02", ["sampler.temperature=0.02"],
           "variety", "entropy", "uniform_groups"),
    digits("constant_reward", "the reward is constant", [own_reward("constant")], "uniform_groups"),
    digits("no_advantage", "all advantages are 0", [f"algorithm.advantage={PARTS}:no_advantage"], "skipped_steps"),
    digits("inverted_reward", "the weight of the accuracy is -1", ["rewards.components.0.weight=-1"],
           "reward_components"),
    digits("failing_reward", "the reward function fails on most responses", [own_reward("fails_often")],
           "reward_parser", "rejected_groups"),
    PlantedRun("unbound_adapters", "policy.lora.target_modules matches nothing",
               (*DIGITS, "policy.lora.rank=8", "policy.lora.target_modules=[attn_proj]"),
               ("model_and_template",), True),
    PlantedRun("glyphs_rate_too_small", "glyphs: learning rate 100 times too small",
               (*GLYPHS, "learner.learning_rate=3e-6"), ("learning_rate",)),
    PlantedRun("glyphs_inverted_reward", "glyphs: the weight of the OCR reward is -1",
               (*GLYPHS, "rewards.components.0.weight=-1"), ("reward_components",)),
)  # fmt: skip

FURTHER: tuple[PlantedRun, ...] = (
    digits("temperature_3", "sampler.temperature=3", ["sampler.temperature=3"], "greedy_and_sampled"),
    digits("rate_01", "learning rate 0.1", ["learner.learning_rate=0.1"], "learning_rate"),
    digits("coin_flip", "the reward is a coin flip", [own_reward("coin_flip")], "reward_noise"),
    digits("text_hash", "the reward is a bit of a checksum of the text", [own_reward("text_hash")],
           "reward_noise", "answers_and_labels"),
    digits("late_reward", "each response gets the reward of the response before it", [own_reward("late_reward")],
           "reward_noise"),
    digits("inverted_advantage", "the advantage has the wrong sign",
           [f"algorithm.advantage={PARTS}:inverted_advantage"], "reward_trend"),
    digits("entropy_bonus", "algorithm.entropy.bonus=1", ["algorithm.entropy.bonus=1"], "entropy"),
    digits("stop_string", "a stop string ends responses before the answer", ["sampler.stop_strings=['{']"],
           "reward_parser"),
    digits("half_noise", "half of the training labels belong to other rows", own_data("half_noise"),
           "answers_and_labels"),
    digits("next_digit", "training labels are one too high, held-out labels are right", own_data("next_digit"),
           "reward_exploitation", "greedy_and_sampled"),
    digits("clipped_gradient", "learner.max_grad_norm=1e-7", ["learner.max_grad_norm=1e-7"],
           "learning_rate", "skipped_steps"),
    digits("weight_decay", "learner.weight_decay=100", ["learner.weight_decay=100"], "weight_decay"),
    digits("one_likely_token", "sampler.top_p=0.05", ["sampler.top_p=0.05"], "variety"),
)  # fmt: skip
"""Faults that the authors of the checks did not plant."""

HEALTHY: tuple[PlantedRun, ...] = (
    PlantedRun("digits", "digits, synchronous", DIGITS),
    digits("digits_async", "digits, one version ahead", ["algorithm.max_staleness=1"]),
    PlantedRun("digit_sum", "sums of two digits", ("experiment=digit_sum", *DIGITS[1:])),
    digits("digits_adapters", "digits with adapters", ["policy.lora.rank=16", "learner.learning_rate=2e-3"]),
    PlantedRun("glyphs", "glyphs, Flow-GRPO", GLYPHS),
    digits("reward_of_100", "digits, weight 100", ["rewards.components.0.weight=100"]),
    digits("digits_rloo", "digits, RLOO", ["algorithm=rloo"]),
    digits("digits_cooler", "digits, temperature 0.7", ["sampler.temperature=0.7"]),
)


@dataclass(frozen=True)
class Outcome:
    """The findings of a run by check."""

    run: PlantedRun
    findings: dict[str, RunFinding]

    @property
    def found(self) -> list[str]:
        """The expected checks that report a fault or a warning."""
        serious = [name for name, finding in self.findings.items() if finding.verdict in SERIOUS]
        return [name for name in serious if name in self.run.checks]

    @property
    def rank(self) -> int:
        """Place of the first expected check among all findings, from 1; 0 if none reports the fault."""
        return 1 + list(self.findings).index(self.found[0]) if self.found else 0

    @property
    def faults(self) -> list[str]:
        return [name for name, finding in self.findings.items() if finding.verdict is RunVerdict.FAULT]

    @property
    def warnings(self) -> list[str]:
        return [name for name, finding in self.findings.items() if finding.verdict is RunVerdict.WARNING]


def outcome(run: PlantedRun, folder: Path) -> Outcome:
    """Makes the run if `folder` lacks it, and diagnoses it; a refused configuration is diagnosed without a run."""
    words = [word.replace("FOLDER", str(folder)) for word in (*run.words, f"name={run.name}", f"folder={folder}/runs")]
    run_folder = folder / "runs" / run.name
    if run.refused:
        subject = subject_of(words, None)
    else:
        if not (run_folder / "done.json").exists():
            _make(load_config(words), folder / "warm_starts")
        subject = subject_of([], run_folder)
    return Outcome(run, {finding.name: finding for finding in diagnose(subject)})


def _make(config: RunConfig, cache: Path) -> None:
    torch.manual_seed(config.seed)
    try:
        asyncio.run(LocalRun(config, cache).run())
    except MobulaError as error:  # a failed run is diagnosed, too
        sys.stderr.write(f"{config.name}: {type(error).__name__}: {error}\n")
    write_done(config)


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields the lines of the table in docs."""
    yield "| planted | rank | found by | measured |"
    yield "|---|---|---|---|"
    for each in outcomes:
        name = each.found[0] if each.found else ""
        measured = each.findings[name].measured.replace("|", "\\|") if name else "not found"
        yield f"| {each.run.title} | {each.rank or '-'} | {f'`{name}`' if name else '-'} | {measured} |"


def is_made(run: PlantedRun, folder: Path) -> bool:
    return run.refused or (folder / "runs" / run.name / "done.json").exists()


def main(arguments: Sequence[str]) -> None:
    folder, names = Path(arguments[0]).resolve(), arguments[1:]
    if "--table" in names:
        found = [outcome(run, folder) for run in (*FAULTS, *FURTHER) if is_made(run, folder)]
        sys.stdout.write("\n".join(table(found)) + "\n")
        for each in [outcome(run, folder) for run in HEALTHY if is_made(run, folder)]:
            sys.stdout.write(f"healthy {each.run.name}: faults {each.faults} warnings {each.warnings}\n")
        return
    for run in (*FAULTS, *FURTHER, *HEALTHY):
        if not names or run.name in names:
            try:
                each = outcome(run, folder)
            except Exception:  # the other runs are made
                traceback.print_exc()
                continue
            sys.stdout.write(f"{run.name}: found {each.found} faults {each.faults} warnings {each.warnings}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
