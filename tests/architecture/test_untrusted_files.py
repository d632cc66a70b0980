"""No file is read in a way that can run code which it holds.

`tests/unit/deploy/test_foreign_files.py` and `tests/unit/learner/test_state_files.py` try what the libraries open.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from sources import Source, parse, sources

LOADERS = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "dill.load",
    "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "pandas.read_pickle", "eval", "exec",
    "dcp.load", "dcp.FileSystemReader", "load_checkpoint", "get_fp32_state_dict_from_zero_checkpoint",
}  # fmt: skip
# Where a loader reads what this process has made itself, or what is restricted or was checked before: {path: why}.
OWN = {
    "actors/rollout/server.py": "shows that an error can be pickled, by a round trip in memory",
    "rewards/isolation/foreign.py": "reads requests that the parent process writes to a pipe",
    "learner/state_files.py": "replaces the metadata reader of torch, and restricts the unpickler",
    "learner/backends/deepspeed.py": "reads each file of a state with weights_only=True before",
}
AUTOMATIC = ("Auto", "auto_class", "processor_class")  # classes of transformers that may run code of a repository


def dotted(node: ast.expr) -> str:
    """`a.b.c` of such an expression; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def unsafe_reads(source: Source) -> Iterator[str]:
    """Each call that may run what a file holds."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            bases = [base for base in map(dotted, node.bases) if base in LOADERS and source.path not in OWN]
            yield from (f"{source.path}:{node.lineno} {base}" for base in bases)
        if not isinstance(node, ast.Call):
            continue
        name, options = dotted(node.func), {word.arg: word.value for word in node.keywords}
        place = f"{source.path}:{node.lineno} {name}"
        if (name in LOADERS or name.rpartition(".")[2] in LOADERS - {"eval", "exec"}) and source.path not in OWN:
            yield place
        owner, _, method = ast.unparse(node.func).rpartition(".")
        if method in ("from_pretrained", "from_config") and owner.startswith(AUTOMATIC):
            if "trust_remote_code" not in options:
                yield f"{place} without trust_remote_code=False, which asks the user"
        if name == "torch.load" and not is_true(options.get("weights_only")):
            yield f"{place} without weights_only=True"
        for option in ("allow_pickle", "trust_remote_code"):
            if option in options and not is_false(options[option]):
                yield f"{place} with {option}"


def is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_no_file_can_run_code() -> None:
    assert [place for source in sources() for place in unsafe_reads(source)] == []


@pytest.mark.parametrize(
    "text",
    [
        "pickle.load(file)", "torch.load(path)", "torch.load(path, weights_only=False)", "yaml.load(text, Loader)",
        "np.load(path, allow_pickle=True)", "AutoModel.from_pretrained(path, trust_remote_code=True)", "eval(text)",
        "AutoModel.from_pretrained(path, trust_remote_code=given)", "AutoConfig.from_pretrained(path)",
        "auto_class(own).from_config(own)", "dcp.load(state)", "class Reader(dcp.FileSystemReader): ...",
        "class Reader(pickle.Unpickler): ...", "self._engine.load_checkpoint(path)",
    ],
)  # fmt: skip
def test_each_of_them_is_seen(text: str) -> None:
    assert len(list(unsafe_reads(parse("learner/x.py", text)))) == 1


def test_safe_reads_are_none() -> None:
    text = "torch.load(path, weights_only=True); np.load(path, allow_pickle=False); model.eval(); yaml.safe_load(text)"
    assert list(unsafe_reads(parse("learner/x.py", text))) == []
