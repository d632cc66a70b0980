"""The files of docs/extending.md, written into an empty folder and named on the page's command lines, work."""

from __future__ import annotations

import logging
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import engine_settings, open_model
from learner_data import group, prompt, tiny_config, with_logprobs
from metrics_data import make_group
from rich.console import Console
from transformers import AutoTokenizer

from mobula.actors.environments.base import Action
from mobula.actors.environments.registry import build_environment
from mobula.actors.samplers import build_sampler
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.roles import ReplayStats, SamplingSettings, UpdateReport
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.preflight.user_code import check_user_code
from mobula.deploy.wiring.persistence import build_metrics
from mobula.deploy.wiring.preparation import prepare
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^    mobula train ((?:.*\\\n)*.*)", re.MULTILINE)
WORDS = [shlex.split(words.replace("\\\n", " ")) for words in COMMAND.findall(PAGE)]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every file of the page, which is the working directory."""
    for name, content in BLOCK.findall(PAGE):
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "model", seed=0)


def named(file: str) -> list[str]:
    """The words of the page's command that names a file."""
    [words] = [words for words in WORDS if any(file in word for word in words)]
    return words


def test_every_file_is_named_by_a_command_and_every_block_is_a_file() -> None:
    files = [name for name, _ in BLOCK.findall(PAGE)]
    assert len(files) == PAGE.count("```") / 2 == len(WORDS)
    assert [file for file in files if not named(file)] == []


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[-1])
def test_every_command_composes_and_its_code_is_imported_with_its_options(words: list[str], own: Path) -> None:
    config = load_config(words)
    check_user_code(config)
    if config.environment.is_on:
        build_environment(config.environment.name, config.environment.options)


def update(model: Path, words: list[str]) -> dict[str, float]:
    """The metrics of one update of a learner."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    scored = group(prompt(tokenizer, "p"), [[1, 2], [3], [4, 5, 6]], [1.0, 0.0, 0.0])
    found = with_logprobs(scored, [t.behavior_logprobs for t in scored.group.trajectories])
    learner = Learner(tiny_config(model, *words), 0, 1, ())
    learner.connect("")
    metrics = dict(learner.update([found], 1).metrics)
    assert metrics["skipped"] == 0 and math.isfinite(metrics["loss"])
    return metrics


def test_a_step_is_taken_with_all_parts_of_the_learner(own: Path, model: Path) -> None:
    files = ("advantages.py", "losses.py", "terms.py", "optimizers.py")
    words = [word for file in files for word in named(file) if word != "experiment=digits"]
    plain, changed = update(model, []), update(model, [*words, "algorithm.kl.coef=0"])
    assert changed["loss"] != plain["loss"]


def test_rows_of_an_own_reader_and_format_become_prompts(own: Path, model: Path) -> None:
    for split in ("train", "validation", "test"):
        (own / f"{split}.csv").write_text("a,b\n3,4\nx,4\n1,1\n")
    places = {"policy.model=MODEL": f"policy.model={model}", "data.path=FOLDER": f"data.path={own}"}
    words = [places.get(word, word) for word in named("rows.py")]
    prepared = prepare(load_config([*words, "data.max_skipped_fraction=0.5"]), lambda value: value)
    assert [(row.question, row.answer) for row in prepared.splits["train"].rows] == [
        ("What is 3 + 4?", "7"),
        ("What is 1 + 1?", "2"),
    ]
    assert "rows.py:exercise raised ValueError: invalid literal for int()" in str(prepared.skipped[0])


def test_an_own_processor_makes_the_prompts(own: Path, model: Path) -> None:
    for split in ("train", "validation", "test"):
        (own / f"{split}.jsonl").write_text('{"question": "Which?", "answer": "7"}\n')
    words = [f"policy.model={model}", f"data.path={own}", *named("processors.py")[1:]]
    prepared = prepare(load_config(words), lambda value: value)
    made = prepared.processor.prepare(prepared.splits["train"].rows[0], "0/0/x")
    assert "Which? Be brief." in made.text


def test_an_own_environment_answers(own: Path) -> None:
    config = load_config(named("my_environments.py")).environment
    environment = build_environment(config.name, config.options)
    reset = environment.reset(seed=0, options={})
    assert reset.observation[0].text == "Guess a number from 1 to 100."
    assert environment.step(Action("0")).observation[0].text == "higher"


async def test_an_own_sampler_samples(own: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = open_model(model, *named("samplers.py")[1:])
    sampler = build_sampler(opened.config.sampler.kind, engine_settings(opened))
    await sampler.start()
    with caplog.at_level(logging.INFO):
        settings = SamplingSettings(2, 1.0, 4, 0)
        sampled = await sampler.sample(opened.prompts[0], (), settings, Attempt("r"), lambda *_: None)
    assert len(sampled) == 2 and f"{opened.prompts[0].prompt_id} took " in caplog.text
    await sampler.close()


def test_an_own_sink_gets_the_steps(own: Path) -> None:
    off = ["metrics.ray=false", "metrics.progress=false", "metrics.tensorboard=false"]
    config: RunConfig = load_config([*named("sinks.py"), f"folder={own}", "name=r", *off])
    config.run_folder.mkdir()
    metrics = build_metrics(config, Console(), 0)
    with metrics.step(3) as step:
        step.record([make_group("a", [1.0, 0.0, 0.0, 0.0])], UpdateReport(3, {}), ReplayStats(0, 1, 1, 0.0, {}))
    metrics.close()
    number, reward, seconds = (config.run_folder / "steps.csv").read_text().strip().split(",")
    assert (number, reward) == ("3", "0.25") and float(seconds) > 0


def test_the_formulas_of_the_page(own: Path) -> None:
    """By hand: medians of two groups, the gradient of a truncated ratio, and the terms."""
    from mobula.cluster.user_code import load

    rewards = SimpleNamespace(
        values=torch.tensor([1.0, 0.0, 9.0, 5.0, 7.0]),
        included=torch.tensor([True, True, True, True, False]),
        group_ids=torch.tensor([0, 0, 0, 1, 1]),
    )
    assert load("advantages.py:median")(rewards, None).tolist() == [0.0, -1.0, 8.0, 0.0, 0.0]
    logprobs, old = torch.tensor([[-1.0, -1.0]], requires_grad=True), torch.tensor([[-2.0, -2.0]])
    out = load("losses.py:topr")(logprobs, old, torch.tensor([[1.0, -1.0]]), None, cap=1.0)
    assert torch.autograd.grad(out.loss.sum(), logprobs)[0].tolist() == [[-1.0, 1.0]]
    mask = torch.tensor([[True, True], [True, False]])
    proximal = torch.tensor([[0.1, 0.1], [1.0, 5.0]])
    weights = load("terms.py:geometric")(proximal, torch.zeros(2, 2), mask, cap=1.2)
    assert weights.tolist() == [pytest.approx([math.exp(0.1)] * 2), [0.0, 0.0]]
