"""Pages and tables that are generated from the code, and commands of examples, are those of today."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from docs.generate import measured, metric_tables, support_tables
from docs.generate.support_tables import BEGIN, END, choices, rewritten
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.conformance.measure import ALL, Gap, Report
from benchmarks.conformance.table import failures, page
from mobula.cluster.metrics.definitions import CounterName, LiveName, MetricName, SplitName
from mobula.configs.load import load_config
from mobula.deploy.checks.parity import CASES
from mobula.learner.algorithms.advantages import ADVANTAGES
from mobula.learner.algorithms.corrections import CORRECTIONS, OLD_LOGPROBS
from mobula.learner.algorithms.flow_losses import FLOW_LOSSES
from mobula.learner.algorithms.kl import KL_ESTIMATORS
from mobula.learner.algorithms.offline_losses import PREFERENCE_LOSSES, SCORE_LOSSES
from mobula.learner.algorithms.policy_losses import AGGREGATIONS, POLICY_LOSSES
from mobula.learner.algorithms.token_advantages import TOKEN_ADVANTAGES, TURN_ADVANTAGES
from mobula.learner.optim import OPTIMIZERS

COMPARED = Gap(mean=6e-7, max=2e-6)


def comparison(**own: object) -> Report:
    found = Report(
        name="internvl3", model_type="internvl", is_tied=False, num_parameters=534_208,
        same_ids=dict.fromkeys(CASES, True), gaps=dict.fromkeys(CASES, COMPARED),
        pushes={"vision": COMPARED, ALL: COMPARED}, moved={"vision": 0.3, ALL: 2.0}, adapters=COMPARED,
        adapters_load=True, export_loads=True,
    )  # fmt: skip
    return replace(found, **own)


def test_a_family_that_conforms_has_a_row_and_no_note() -> None:
    assert failures(comparison()) == []
    text = page([comparison(), comparison(name="qwen3", model_type="qwen3", gaps={"text": COMPARED})])
    assert "| `internvl` | `internvl3` | untied | 0.53 M | 6e-07 / 2e-06 |" in text
    assert "| `qwen3` | `qwen3` | untied | 0.53 M | 6e-07 / 2e-06 | - | - |" in text
    assert "- `internvl3`:" not in text and "- `qwen3`:" not in text
    assert "- `qwen3_vl_moe`: engine and learner choose experts each for themselves" in text
    accepted = next(line for line in text.splitlines() if line.startswith("Accepted"))
    assert "`llama`" in accepted and "`internvl`" not in accepted
    assert "- `qwen3_5_moe`: its experts lie transposed" in text


def test_architectures_with_one_kind_of_embeddings_are_named() -> None:
    both = [comparison(), comparison(is_tied=True)]
    always = comparison(name="gemma3", model_type="gemma3", is_tied=True)
    never = comparison(name="llama", model_type="llama")
    text = page([*both, always, never])
    assert "always tied, whatever `tie_word_embeddings` says: `gemma3`." in text
    assert "always untied, whatever `tie_word_embeddings` says: `llama`." in text
    assert "always" not in page(both)


def test_a_row_in_bfloat16_has_a_wider_tolerance() -> None:
    wide = dict.fromkeys(CASES, Gap(2e-2, 1e-1))
    assert failures(comparison(gaps=wide, dtype="bfloat16")) == []
    assert len(failures(comparison(gaps=wide))) == len(CASES)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"same_ids": {"one image": False}}, "the engine expands 'one image' otherwise"),
        ({"gaps": {"text": Gap(2e-2, 4e-2)}}, "text: the mean gap is 2.0e-02, more than 1e-05"),
        ({"pushes": {ALL: Gap(float("nan"), 0.0)}}, "a push of all weights: the mean gap is nan"),
        ({"moved": {"vision": 0.0}}, "a push of vision does not move the engine"),
        ({"adapters": Gap(2e-2, 4e-2)}, "a push of adapters: the mean gap is 2.0e-02"),
        ({"adapters_load": False}, "PEFT does not make of the exported adapters"),
        ({"export_loads": False}, "the exported checkpoint does not load"),
    ],
)
def test_what_a_family_does_not_hold_is_named(own: dict[str, object], message: str) -> None:
    [found] = failures(comparison(**own))
    assert found.startswith(message)
    assert f"- `internvl3`: {found}." in page([comparison(**{"pushes": {ALL: COMPARED}} | own)])


@pytest.mark.parametrize("generator", [measured, metric_tables], ids=["measured", "metric_tables"])
def test_a_page_has_the_tables_of_today(generator: ModuleType) -> None:
    page = generator.TARGET.read_text(encoding="utf-8")
    assert generator.rewritten(page) == page, f"run `python -m {generator.__name__}`"
    with pytest.raises(ValueError, match="needs one line"):
        generator.rewritten("")


def test_every_name_is_described_and_no_gauge_has_two_meanings() -> None:
    gauges = (*MetricName, *LiveName, *SplitName)
    assert all(metric.help for metric in (*gauges, *CounterName))
    series = [*gauges, *(f"{name}_total" for name in CounterName)]
    assert len(series) == len(set(series))


REPOSITORY = Path(__file__).parents[3]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def required(*extras: str) -> list[Requirement]:
    """Direct requirements of the project with these extras, and with the project's extras that they name."""
    lines = list(PROJECT["dependencies"])
    left = list(extras)
    while left:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][left.pop()]):
            if requirement.name == PROJECT["name"]:
                left += requirement.extras
            else:
                lines.append(str(requirement))
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_a_lock_has_an_allowed_version_of_every_requirement(extra: str) -> None:
    text = (REPOSITORY / "deploy" / "locks" / f"{extra}.txt").read_text(encoding="utf-8")
    assert "://" not in text and " @ " not in text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pins = (line.partition(" ;")[0].partition("==") for line in lines)
    locked = {canonicalize_name(name): version for name, _, version in pins}
    unfit = [
        str(requirement)
        for requirement in required(extra, "test")
        if (version := locked.get(canonicalize_name(requirement.name))) is None or version not in requirement.specifier
    ]
    assert unfit == [], "run deploy/locks/update.sh"


SCRIPTS = sorted((REPOSITORY / "examples").glob("*.sh"))


def words_of(script: Path, folder: Path, *more: str) -> list[str]:
    """What the script hands to `mobula`."""
    command = folder / "mobula"
    command.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    command.chmod(0o755)
    settings = {"MOBULA": str(command), "MODEL": "model", "DATA": "data", "PATH": os.environ["PATH"]}
    done = subprocess.run([script, *more], env=settings, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.split("\0")[:-1]


def test_there_are_examples() -> None:
    assert len(SCRIPTS) >= 3


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_is_a_valid_configuration(script: Path, tmp_path: Path) -> None:
    command, *words = words_of(script, tmp_path, "seed=7")
    assert command == "train"
    config = load_config(words)
    assert config.seed == 7 and config.name.startswith("example-")
    assert f"`{script.name}`" in (REPOSITORY / "examples" / "README.md").read_text()


def test_readme_and_docs_have_the_generated_tables() -> None:
    for file, block in (
        (support_tables.README, support_tables.summary()),
        (support_tables.TARGET, support_tables.text()),
    ):
        page = file.read_text(encoding="utf-8")
        assert rewritten(page, block) == page, "run `python -m docs.generate.support_tables`"


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("algorithm.advantage", (*ADVANTAGES, *TOKEN_ADVANTAGES, *TURN_ADVANTAGES)),
        ("algorithm.loss", (*POLICY_LOSSES, *FLOW_LOSSES)),
        ("algorithm.loss_aggregation", AGGREGATIONS),
        ("algorithm.kl.estimator", KL_ESTIMATORS),
        ("algorithm.old_logprobs", OLD_LOGPROBS),
        ("algorithm.correction", CORRECTIONS),
        ("learner.optimizer", OPTIMIZERS),
        ("offline.dpo.loss", PREFERENCE_LOSSES),
        ("offline.reward_model.loss", SCORE_LOSSES),
    ],
)
def test_what_a_registry_holds_is_what_its_key_takes(key: str, registry: Iterable[str]) -> None:
    assert set(choices(key)) == set(registry)


def test_an_edited_table_is_written_again_and_the_text_around_it_stays() -> None:
    page = f"# Head\n\n{BEGIN}\n| `made_up` |\n{END}\n\ntail\n"
    block = support_tables.text()
    again = rewritten(page, block)
    assert again.startswith("# Head\n\n") and again.endswith("\n\ntail\n")
    assert "made_up" not in again and "`qwen2_5_vl`" in again
    assert rewritten(again, block) == again


@pytest.mark.parametrize("page", ["no markers", f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_page_without_one_block_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="add them"):
        rewritten(page, "")
