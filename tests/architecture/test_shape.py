"""Names and shape of the code: directories, classes, families, prints, docstrings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
from sources import ROOT, Source, parse, sources

NAMES_OF_MODELS = ("learner/policies/families/", "learner/policies/tiny/")
TOP_FOLDERS = {*"actors benchmarks cluster configs deploy docs examples learner rewards tests".split()}


def ignored_folders() -> set[str]:
    """Folders at the root that .gitignore names: results, data, caches."""
    lines = (ROOT / ".gitignore").read_text().split()
    return {line.strip("/") for line in lines if line.endswith("/")}


def prints(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{source.path}:{node.lineno}"


def test_the_top_level_folders_are_those_of_the_design() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    built = {name for name in folders if name.endswith(".egg-info")}
    assert folders - ignored_folders() - built == TOP_FOLDERS


def test_nothing_prints() -> None:
    assert [place for source in sources() for place in prints(source)] == []


def test_every_module_has_a_docstring() -> None:
    silent = [source.path for source in sources() if source.text.strip() and not ast.get_docstring(source.tree)]
    assert silent == []


def test_no_file_names_are_twins_of_a_modality() -> None:
    others = [source.path for source in sources() if not source.path.startswith(NAMES_OF_MODELS)]
    twins = [path for path in others if path.removesuffix(".py").endswith(("_vl", "_v2", "_new"))]
    assert twins == []


@pytest.mark.parametrize(("text", "found"), [("print(1)", 1), ("console.print(1)", 0), ("def f():\n    print()", 1)])
def test_a_print_is_seen(text: str, found: int) -> None:
    assert len(list(prints(parse("cluster/x.py", text)))) == found


SHARED = {"Learner": "the protocol of the role in `cluster.roles`, and one rank of it"}


def names(found: Iterable[Source]) -> dict[str, list[str]]:
    """Class name -> the files that define it; names with a leading underscore are left out."""
    files = defaultdict(list)
    for source in found:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(source.path)
    return files


def shared_names(found: Iterable[Source]) -> dict[str, list[str]]:
    return {name: files for name, files in names(found).items() if len(files) > 1}


def test_a_class_name_has_one_meaning() -> None:
    refused = {name: files for name, files in shared_names(sources()).items() if name not in SHARED}
    assert refused == {}, "give the new class a more specific name"


def test_the_list_holds_no_name_that_is_unique() -> None:
    assert set(SHARED) - set(shared_names(sources())) == set()


def test_two_classes_of_one_name_are_seen() -> None:
    text = "class Row:\n    pass\n\n\nclass _Part:\n    pass"
    found = [parse("cluster/x.py", text), parse("rewards/y.py", text)]
    assert shared_names(found) == {"Row": ["cluster/x.py", "rewards/y.py"]}


NAMES = re.compile(
    r"qwen|internvl|llava|smolvlm|idefics|gemma|glm_?-?4|llama(?!-factory)|mistral|nextstep", re.IGNORECASE
)
HOME = (
    "learner/policies/families/", "learner/policies/pretrained.py", "learner/policies/tiny/",
    "learner/policies/flow/families.py", "learner/policies/flow/tiny/", "learner/policies/image_tokens.py",
    "learner/policies/nextstep/", "learner/policies/flow/patches.py",
)  # fmt: skip
# Names of another program's models, which it wants on its command line.
FOREIGN = ("deploy/checks/lmms_eval.py", "deploy/cli/check_commands.py")


def named(source: Source) -> list[str]:
    lines = enumerate(source.text.splitlines(), start=1)
    return [f"{source.path}:{number} {found[0]}" for number, line in lines for found in NAMES.finditer(line)]


def test_nothing_outside_names_a_family() -> None:
    others = [source for source in sources() if not source.path.startswith((*HOME, *FOREIGN))]
    assert [place for source in others for place in named(source)] == []


@pytest.mark.parametrize(("text", "num"), [("kind == 'qwen2_vl'", 1), ("# as InternVL does", 1), ("VISION = 1", 0)])
def test_a_name_is_seen(text: str, num: int) -> None:
    assert len(named(parse("actors/x.py", text))) == num
