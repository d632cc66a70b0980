"""The page of measured families names every failure and shows every gap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mobula.deploy.conformance.measure import ALL, Gap, Report
from mobula.deploy.conformance.table import failures, page
from mobula.deploy.wiring.parity_prompts import CASES

GOOD = Gap(mean=6e-7, max=2e-6)


def report(**own: object) -> Report:
    found = Report(
        name="internvl3",
        model_type="internvl",
        is_tied=False,
        num_parameters=534_208,
        same_ids=dict.fromkeys(CASES, True),
        gaps=dict.fromkeys(CASES, GOOD),
        pushes={"vision": GOOD, ALL: GOOD},
        moved={"vision": 0.3, ALL: 2.0},
        adapters=GOOD,
        adapters_load=True,
        export_loads=True,
    )
    return replace(found, **own)


def test_a_family_that_conforms_has_a_row_and_no_note() -> None:
    assert failures(report()) == []
    text = page([report(), report(name="qwen3", model_type="qwen3", gaps={"text": GOOD})])
    assert "| `internvl` | `internvl3` | untied | 0.53 M | 6e-07 / 2e-06 |" in text
    assert "| `qwen3` | `qwen3` | untied | 0.53 M | 6e-07 / 2e-06 | - | - |" in text
    assert "- `internvl3`:" not in text and "- `qwen3`:" not in text
    assert "- `qwen3_vl_moe`: engine and learner choose experts each for themselves" in text
    accepted = next(line for line in text.splitlines() if line.startswith("Accepted"))
    assert "`llama`" in accepted and "`internvl`" not in accepted
    assert "| `qwen3_5_moe` | its experts lie transposed" in text


def test_architectures_with_one_kind_of_embeddings_are_named() -> None:
    both = [report(), report(is_tied=True)]
    always, never = report(name="gemma3", model_type="gemma3", is_tied=True), report(name="llama", model_type="llama")
    text = page([*both, always, never])
    assert "always tied, whatever `tie_word_embeddings` says: `gemma3`." in text
    assert "always untied, whatever `tie_word_embeddings` says: `llama`." in text
    assert "always" not in page(both)


def test_a_row_in_bfloat16_has_a_wider_tolerance() -> None:
    wide = dict.fromkeys(CASES, Gap(2e-2, 1e-1))
    assert failures(report(gaps=wide, dtype="bfloat16")) == []
    assert len(failures(report(gaps=wide))) == len(CASES)


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
    [found] = failures(report(**own))
    assert found.startswith(message)
    assert f"- `internvl3`: {found}." in page([report(**{"pushes": {ALL: GOOD}} | own)])
