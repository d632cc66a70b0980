"""Rows are packed and share prompts where models, sampler and attention can; one line says why not."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from mobula.cluster.replay.journal import journal_identity
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.planning.clusters import described_nodes
from mobula.deploy.planning.memory import TRAINING
from mobula.deploy.planning.plan_command import plan_memory
from mobula.deploy.preflight.decisions import with_absolute_paths, with_decisions, with_row_layout
from mobula.learner.policies.shapes import shape_of
from mobula.learner.policies.tiny import write_tiny

WARNED = "supervision.on_logprob_gap=warn"
IMAGE_TOKENS = [
    "experiment=digits", "sampler=image_tokens", "warm_start=none", "evaluation.num_samples=1", "algorithm.kl.coef=0",
    "resources.reference.num_workers=0",
]  # fmt: skip
FLASH = ("policy.attention=flash_attention_2", "resources=gpu_1")
TAUGHT = (
    "algorithm.distillation.coef=1", "algorithm.distillation.teacher={models}/qwen3.5", "algorithm.kl.coef=0"
)  # fmt: skip
BOTH, NOTHING_SHARED, PADDED = (True, True), (True, False), (False, True)
"""`learner.packing` and `learner.share_prompts` of a run."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "qwen3.5", "gemma3", "llava"):
        write_tiny(name, folder / name, seed=0)
    return folder


def run_of(models: Path, name: str, *words: str) -> RunConfig:
    own = [word.format(models=models) for word in words]
    return load_config(["experiment=digits", f"policy.model={models / name}", "policy.tiny=none", *own])


@pytest.mark.parametrize(
    ("name", "words", "expected", "line"),
    [
        ("qwen3", (), BOTH, ""),
        ("qwen3", ("learner.share_prompts=false",), NOTHING_SHARED, ""),
        ("qwen3", ("learner.packing=false",), PADDED, ""),
        ("qwen3", ("policy.attention=eager",), PADDED, "packing is off: policy.attention=eager does not keep"),
        ("qwen3", FLASH, NOTHING_SHARED, "share_prompts is off: policy.attention=fl"),
        ("qwen3", ("policy.dropout=true", WARNED), NOTHING_SHARED, "share_prompts is off: policy.dropout=true is"),
        ("qwen3.5", (), PADDED, r"packing is off: a qwen3_5 \(policy.model=.*\): its layers carry a state"),
        ("gemma3", (), PADDED, r"packing is off: a gemma3 \(.*\): its images need a mask; learner.packing=true packs"),
        ("gemma3", ("learner.packing=true",), BOTH, ""),
        ("llava", (), PADDED, r"packing is off: a llava \(.*\): it has no family file"),
        ("llava", ("learner.packing=true",), NOTHING_SHARED, r"share_prompts is off: a llava .* that says it can"),
        ("qwen3", TAUGHT, PADDED, r"packing is off: a qwen3_5 \(algorithm.distillation.teacher="),
    ],
)
def test_rows_are_packed_where_everything_allows_it(
    models: Path,
    name: str,
    words: tuple[str, ...],
    expected: tuple[bool, bool],
    line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    found = with_row_layout(run_of(models, name, *words)).learner
    assert (found.packing, found.share_prompts) == expected
    assert found.shares_prompts is (expected == BOTH)
    assert len(caplog.messages) == bool(line) and all(re.search(f"learner.{line}", found) for found in caplog.messages)


@pytest.mark.parametrize(("words", "num_lines"), [(["experiment=glyphs_grpo"], 0), (IMAGE_TOKENS, 1)])
def test_samplers_of_images_have_padded_rows(
    models: Path, words: list[str], num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = with_row_layout(load_config([*words, f"policy.model={models / 'qwen3'}"]))
    assert config.learner.packing is False
    assert len(caplog.messages) == num_lines


def test_memory_is_planned_for_the_rows_of_the_run(models: Path) -> None:
    """A run with padded rows keeps the activations of every copy of a prompt."""
    words = ("data.max_prompt_tokens=480", "sampler.max_model_len=512", "learner.tokens_per_microbatch=100000")
    nodes = described_nodes("1x1x80GB")

    def activations(name: str, *more: str) -> int:
        run = run_of(models, name, "resources=gpu_1", *words, *more)
        plan = plan_memory(run, shape_of(str(models / name)), nodes)
        return plan.by_role["learner"].device[TRAINING]["activations"]

    assert activations("gemma3") == activations("gemma3", "learner.packing=false")
    assert activations("qwen3") < 0.5 * activations("qwen3", "learner.packing=false")


def test_a_configuration_is_decided_once_and_stays_so(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = ["data=jsonl", "data.path=data", "data.cache_path=cache", "folder=runs", "rewards=math_answer"]
    config = run_of(models, "gemma3", *words)
    monkeypatch.chdir(tmp_path)
    found = with_decisions(config)
    assert found.learner.packing is False and config.learner.packing == "auto"
    assert found.data.prompt_suffix == config.question_suffix != config.data.prompt_suffix == "auto"
    assert (found.data.path, found.data.cache_path, found.folder) == tuple(
        tmp_path / n for n in ("data", "cache", "runs")
    )
    num_lines = len(caplog.messages)
    monkeypatch.chdir("/")
    assert with_decisions(found) == found and len(caplog.messages) == num_lines
    assert journal_identity(found) != journal_identity(config), "undecided, it is of another learner"


def test_paths_are_those_of_the_folder_of_the_command_and_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def reward(request):\n    return 0.0\n")
    (tmp_path / "rows").mkdir()
    component = "{name: mine, function: mine.py:reward, weight: 1.0, options: {}, service: reward}"
    found = with_absolute_paths(
        load_config(
            [
                "experiment=own",
                "policy.model=org/name",
                "data.path=rows",
                f"rewards.components=[{component}]",
                "rewards.accuracy_component=mine",
                "algorithm.supervised.path=rows",
                "algorithm.supervised.coef=0.1",
            ]
        )  # fmt: skip
    )
    assert (found.policy.model, found.data.path) == ("org/name", tmp_path / "rows")
    assert found.rewards.components[0].function == f"{tmp_path}/mine.py:reward"
    assert found.algorithm.supervised.path == str(tmp_path / "rows")
    assert with_absolute_paths(load_config(["experiment=digits"])).policy.model.startswith(f"{tmp_path}/")
    for words in (["experiment=calculator"], ["experiment=own", "policy.model=m", "data=huggingface", "data.path=a/b"]):
        config = load_config(words)
        assert with_absolute_paths(config).data.path == config.data.path, "it is no folder"
