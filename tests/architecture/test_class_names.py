"""No two public classes of the product have one name, except those that are listed with what they have in common."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from sources import Source, parse, sources

SHARED = {
    "Learner": "the protocol of the role in `cluster.roles`, and one rank of it",
    "Measurement": "engine and learner of one checkpoint, of text models and of flow models",
    "Turn": "a message of a conversation, of RL rows and of offline rows",
    "Writer": "the protocol of what writes a small model, tiny or pretrained",
}


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
