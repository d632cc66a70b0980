"""The rows of `algorithm.supervised` are checked before a run, prepared beside its prompts and given out by version."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from offline_data import conversation, write_rows

from mobula.cluster.errors import PreflightError
from mobula.cluster.replay.run_identity import run_identity
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.configs.words import overridden
from mobula.deploy.wiring import build
from mobula.deploy.wiring.preparation import prepare
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the digits as questions, and some of them as conversations, one of which is too long."""
    made = tmp_path_factory.mktemp("supervised")
    write_tiny_qwen2_5_vl(made / "model", seed=0)
    write_rows(made / "rows", made / "digits", conversation, train=7)
    answer = {"role": "assistant", "content": "long " * 300}
    with (made / "rows" / "train.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "messages": [{"role": "user", "content": "Talk."}, answer]}) + "\n")
    return made


def config_of(folder: Path, *words: str) -> RunConfig:
    base = ("experiment=digits", f"policy.model={folder / 'model'}", f"data.path={folder / 'digits'}")
    mixed = (f"path={folder / 'rows'}", "coef=0.1", "batch_size=2", "max_tokens=128")
    mixed = tuple(f"algorithm.supervised.{word}" for word in mixed)
    shared = (*base, *mixed, "algorithm.num_minibatches=2", "data.max_skipped_fraction=0.2")
    return load_config(overridden(shared, words))


async def test_a_step_has_its_rows_with_their_images_and_unusable_ones_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.ray, "put", lambda value: value)
    prepared = prepare(config_of(folder), lambda value: value)
    assert [(skipped.sample, skipped.reason) for skipped in prepared.skipped] == [("long", "too_long")]
    found, again = (build.supervised_rows(prepared) for _ in range(2))
    first, second = await found.of(1), await found.of(2)
    assert [len(first), len(second)] == [4, 4], "two minibatches of two rows each"
    names = [row.summary.sample_id for row in (*first, *second)]
    assert len(set(names[:7])) == 7 and names[7] in names[:7], "an epoch of seven rows, then the next"
    again.restore(1, {"cursor": 4})
    assert [row.summary.sample_id for row in await again.of(2)] == names[4:]
    for row in first:
        [answer] = row.group.trajectories
        assert answer.action_mask.any() and row.group.prompt.media[0].reference.inputs["pixel_values"].size
        assert np.array_equal(answer.weight_versions, np.zeros(answer.num_steps))


def test_a_curriculum_orders_prompts_and_not_the_rows_beside_them(folder: Path) -> None:
    file = folder / "digits" / "train.jsonl"
    whole = file.read_text(encoding="utf-8")
    rows = [json.loads(line) | {"level": n} for n, line in enumerate(whole.splitlines()[:20])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ("data.curriculum.kind=easy_first", "data.curriculum.key=level")
    try:
        prepared = prepare(config_of(folder, *words), lambda value: value)
    finally:
        file.write_text(whole, encoding="utf-8")
    assert prepared.supervised is not None and len(prepared.supervised.report.rows) == 7
    assert len(prepared.splits["train"].rows) == 20 and [one.sample for one in prepared.skipped] == ["long"]


def test_a_run_without_rows_has_none(folder: Path) -> None:
    off = ("algorithm.supervised.coef=0", "algorithm.supervised.path=")
    config = config_of(folder, *off)
    assert build.supervised_rows(prepare(config, lambda value: value)) is None
    key = "algorithm.supervised.max_tokens"
    assert key not in run_identity(config) and key in run_identity(config_of(folder))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("algorithm.supervised.path=nowhere",), "set algorithm.supervised.path to a folder that holds train.jsonl"),
        (("algorithm.supervised.max_tokens=1000000",), "set algorithm.supervised.max_tokens="),
        (("algorithm.supervised.max_tokens=8",), "samples of the split train are unusable"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_before_a_role_starts(folder: Path, words, message: str) -> None:
    with pytest.raises(PreflightError, match=message):
        prepare(config_of(folder, *words), lambda value: value)
