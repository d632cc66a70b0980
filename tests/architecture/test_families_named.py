"""Model families are named in learner/policies/families and in the writers of tiny models, and nowhere else."""

from __future__ import annotations

import re

import pytest
from sources import Source, parse, sources

NAMES = re.compile(r"qwen|internvl|llava|smolvlm|idefics|gemma|glm_?-?4|llama(?!-factory)|mistral", re.IGNORECASE)
HOME = (
    "learner/policies/families/",
    "learner/policies/pretrained/",
    "learner/policies/tiny/",
    "learner/policies/flow/families/",
    "learner/policies/flow/tiny/",
    "learner/policies/image_tokens/tiny.py",
    "deploy/conformance/flow/plain.py",
)
# Names of another program's models, which it wants on its command line.
FOREIGN = ("deploy/tools/lmms_eval.py", "deploy/cli/lmms_eval_command.py")


def named(source: Source) -> list[str]:
    lines = enumerate(source.text.splitlines(), start=1)
    return [f"{source.path}:{number} {found[0]}" for number, line in lines for found in NAMES.finditer(line)]


def test_nothing_outside_names_a_family() -> None:
    others = [source for source in sources() if not source.path.startswith((*HOME, *FOREIGN))]
    assert [place for source in others for place in named(source)] == []


@pytest.mark.parametrize(("text", "num"), [("kind == 'qwen2_vl'", 1), ("# as InternVL does", 1), ("VISION = 1", 0)])
def test_a_name_is_seen(text: str, num: int) -> None:
    assert len(named(parse("actors/x.py", text))) == num
