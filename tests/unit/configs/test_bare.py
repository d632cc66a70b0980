"""Configurations that are composed without Hydra, and built without pydantic, equal those of a run."""

from __future__ import annotations

import json

import pytest
from absent_packages import run_without_packages

from mobula.configs.bare import load_bare
from mobula.configs.errors import ConfigError
from mobula.configs.groups import EXPERIMENT, groups
from mobula.configs.load import load_config
from mobula.configs.schema.base import ByDtype
from mobula.configs.unvalidated import BaseModel

NAMED = ("policy.model=x", "data.path=y")
COMPOSED = (
    ("experiment=digits",),
    ("experiment=sums", "sampler=huggingface", "learner=single", "resources.learner.num_workers=1"),
    ("experiment=geometry3k", "algorithm=dr_grpo"),
    ("experiment=sd3_5_ocr_grpo",),
    ("resources=multi_node", "resources.num_nodes=3"),
    ("resources=one_gpu_colocated", "learner.packing=true", "policy.lora.rank=8"),
    ("rewards=unified_judge_pool",),
    ("experiment=glyphs_grpo", "algorithm=dance_grpo"),
    ("evaluation=maye", "weight_sync.canary_tolerance=0.5"),
)
DUMP = "import json, sys; from mobula.configs.bare import load_bare; " + (
    "print(json.dumps([load_bare(w).model_dump() for w in json.loads(sys.argv[1])], default=str))"
)


class Inner(BaseModel):
    size: int
    names: tuple[str, ...]


class Outer(BaseModel):
    inner: Inner
    rate: float


@pytest.mark.parametrize("words", COMPOSED, ids=" ".join)
def test_the_groups_compose_as_hydra_composes_them(words: tuple[str, ...]) -> None:
    assert load_bare([*NAMED, *words]) == load_config([*NAMED, *words])


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", groups())
def test_every_option_composes_as_hydra_composes_it(group: str) -> None:
    num_compared = 0
    for option in groups()[group]:
        words = [*NAMED, f"{group}={option}"]
        try:
            expected = load_config(words)
        except ConfigError:  # some options only go with others
            continue
        assert load_bare(words) == expected, option
        num_compared += 1
    assert num_compared > 0 or group == EXPERIMENT


def test_sections_without_pydantic_hold_the_values_of_a_validated_configuration() -> None:
    words = [[*NAMED, *some] for some in COMPOSED]
    done = run_without_packages(["-c", DUMP, json.dumps(words)], timeout_s=60)
    assert done.returncode == 0, done.stderr
    expected = [load_config(some).model_dump(mode="json") for some in words]
    assert json.loads(done.stdout) == expected


def test_without_pydantic_a_contradiction_and_an_unknown_key_are_refused() -> None:
    for words, message in (
        (["learner=single", "resources.learner.num_workers=3"], "learner.backend=single"),
        (["learner.speed=3"], "missing or unknown are speed"),
    ):
        done = run_without_packages(["-c", DUMP, json.dumps([[*NAMED, "experiment=digits", *words]])], timeout_s=60)
        assert done.returncode == 1
        assert message in done.stderr


def test_a_section_without_pydantic_is_frozen_and_copied() -> None:
    outer = Outer.model_validate({"inner": {"size": 3, "names": ["a"]}, "rate": 1})
    assert (outer.inner.names, type(outer.rate)) == (("a",), float)
    copied = outer.model_copy(update={"rate": 2.0})
    assert (copied.rate, outer.rate, copied.inner) == (2.0, 1.0, outer.inner)
    with pytest.raises(AttributeError, match="frozen"):
        outer.rate = 3.0
    with pytest.raises(ValueError, match="missing or unknown are rate"):
        Outer.model_validate({"inner": {"size": 3, "names": []}})


def test_one_number_is_the_bound_of_both_dtypes() -> None:
    assert ByDtype.model_validate(0.5) == ByDtype(float32=0.5, bfloat16=0.5)
