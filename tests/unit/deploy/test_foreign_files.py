"""Models, adapters, data sets and run folders of others: each reader meets files that hold code, and none runs it."""

from __future__ import annotations

import builtins
import io
import json
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_rows import read_split
from fakes import Code
from learner_data import tiny_config
from reward_data import TOOLS
from tiny_checkpoints import write_text_model
from typer.testing import CliRunner

from mobula.cluster.errors import DatasetError
from mobula.configs.load import ConfigError, load_resolved
from mobula.deploy.cli.commands import app
from mobula.deploy.wiring.preparation import load_checked
from mobula.learner.learner import Learner
from mobula.learner.policies.adapters import load_adapter
from mobula.learner.policies.families import family_at
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.rewards.functions import build_function
from mobula.rewards.models.image_scores import load_head

CONVERSATION = {
    "form": "chat", "label": None, "output": "logit", "question_pattern": None, "max_tokens": 64, "batch_size": 1,
}  # fmt: skip
MODEL_PARTS = {
    "config.json": ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText",
                    "AutoModelForMultimodalLM", "AutoModelForSequenceClassification"),
    "tokenizer_config.json": ("AutoTokenizer", "AutoProcessor"),
    "processor_config.json": ("AutoProcessor",),
    "preprocessor_config.json": ("AutoImageProcessor", "AutoProcessor"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("reward"))


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that planted code writes. A question whether to run the code would be answered with yes."""

    def asked(*words: object) -> str:
        (tmp_path / "asked").touch()
        return "y"

    monkeypatch.setattr(builtins, "input", asked)
    return tmp_path / "ran"


def assert_not_run(mark: Path) -> None:
    assert not mark.exists(), "the code of the file ran"
    assert not (mark.parent / "asked").exists(), "the user was asked to run it"


def plant_modules(folder: Path, mark: Path, model_type: str | None) -> None:
    """Each configuration names classes of a module in the folder, `model_type` as one that transformers lacks."""
    (folder / "planted.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Planted: ...\n")
    for name, classes in MODEL_PARTS.items():
        settings = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        settings["auto_map"] = dict.fromkeys(classes, "planted.Planted")
        if name == "tokenizer_config.json":
            settings["auto_map"]["AutoTokenizer"] = ["planted.Planted", "planted.Planted"]
        if name == "config.json" and model_type:
            settings["model_type"] = model_type
        (folder / name).write_text(json.dumps(settings))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(mark)!r}, 'w').close()\n")


def readers_of_models(folder: Path) -> dict[str, Callable[[], object]]:
    config = tiny_config(folder)
    return {
        "family": lambda: family_at(str(folder)),
        "model": lambda: load_model(str(folder), torch.float32, "sdpa"),
        "learner": lambda: Learner(config, 0, 1, ()).connect(""),
        "preflight": lambda: load_checked(config, lambda media: media),  # type: ignore[arg-type]  # keeps nothing
    }


@pytest.mark.parametrize("model_type", [None, "planted"])
def test_code_of_a_models_repository_is_neither_run_nor_offered(
    model: Path, reward_model: Path, tmp_path: Path, mark: Path, model_type: str | None
) -> None:
    folder, rewards = shutil.copytree(model, tmp_path / "model"), shutil.copytree(reward_model, tmp_path / "rewards")
    for planted in (folder, rewards):
        plant_modules(planted, mark, model_type)
    for name, read in readers_of_models(folder).items():
        try:
            read()
        except Exception as error:
            assert model_type, f"{name}: {error}"  # transformers has the classes of the other one
        assert_not_run(mark)
    with suppress(ValueError):
        build_function("reward_model", {"model": str(rewards), **CONVERSATION}, TOOLS)
    assert_not_run(mark)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.bin.index.json"])
def test_code_in_weights_is_refused(model: Path, reward_model: Path, tmp_path: Path, mark: Path, name: str) -> None:
    for source in (model, reward_model):
        folder = shutil.copytree(source, tmp_path / source.name)
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        if name.endswith(".json"):
            index = {"metadata": {}, "weight_map": {"model.norm.weight": "part.bin"}}
            (folder / name).write_text(json.dumps(index))
        torch.save({"model.norm.weight": Code(mark)}, folder / ("part.bin" if name.endswith(".json") else name))
    for reader, read in readers_of_models(tmp_path / model.name).items():
        if reader in ("model", "learner", "preflight"):
            with pytest.raises(Exception):  # noqa: B017  # of transformers, or a finding of the preflight
                read()
        assert_not_run(mark)
    with pytest.raises(ValueError, match=r"options\.model=.* cannot be loaded"):
        build_function("reward_model", {"model": str(tmp_path / reward_model.name), **CONVERSATION}, TOOLS)
    assert_not_run(mark)


def test_code_in_an_adapter_or_a_head_is_refused(model: Path, tmp_path: Path, mark: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    settings["auto_mapping"] = {"base_model_class": "system", "parent_library": "os"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    torch.save({"base_model.model.x.lora_A.weight": Code(mark)}, adapter / "adapter_model.bin")
    loaded = load_model(str(model), torch.float32, "sdpa")
    with pytest.raises(OSError, match=r"adapter_model\.safetensors"):
        load_adapter(loaded, adapter, "foreign")
    torch.save({"0.weight": Code(mark)}, tmp_path / "head.pt")
    with pytest.raises(ValueError, match=r"head\.pt' does not hold its weights"):
        load_head(tmp_path / "head.pt")
    assert_not_run(mark)


def _script(folder: Path, mark: Path) -> None:
    (folder / f"{folder.name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")


def _pickled_table(folder: Path, mark: Path) -> None:
    (folder / "train.pkl").write_bytes(pickle.dumps(Code(mark)))


def _shard(folder: Path, mark: Path) -> None:
    with tarfile.open(folder / "train.tar", "w") as tar:
        torch.save(Code(mark), buffer := io.BytesIO())
        array = io.BytesIO()
        np.save(array, np.array([Code(mark)], dtype=object))
        parts = {"pyd": pickle.dumps(Code(mark)), "pickle": pickle.dumps(Code(mark)), "pth": buffer.getvalue()}
        for suffix, content in {**parts, "npy": array.getvalue(), "json": b'{"question": "q", "answer": "1"}'}.items():
            info = tarfile.TarInfo(f"0.{suffix}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def _extension_column(folder: Path, mark: Path) -> None:
    """As `pyarrow.PyExtensionType` and the index of pandas stand in a file."""
    payload = pickle.dumps(Code(mark))
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload}
    fields = [pa.field("question", pa.string(), metadata=extension), pa.field("answer", pa.string())]
    schema = pa.schema(fields, metadata={b"pandas": payload, b"huggingface": payload})
    pq.write_table(pa.table([["q"], ["1"]], schema=schema), folder / "train.parquet")


def _saved_to_disk(folder: Path, mark: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"question": "q", "answer": "1"}])}).save_to_disk(folder)
    state = json.loads((folder / "train" / "state.json").read_text())
    state |= {"_format_type": "custom", "_format_kwargs": {"transform": f"open({str(mark)!r}, 'w')"}}
    (folder / "train" / "state.json").write_text(json.dumps(state))
    (folder / "train" / "dataset.pkl").write_bytes(pickle.dumps(Code(mark)))


DATA = {
    "script": (_script, "huggingface"), "pickled table": (_pickled_table, "huggingface"),
    "shard in datasets": (_shard, "huggingface"), "shard": (_shard, "webdataset"),
    "extension": (_extension_column, "parquet"), "extension in datasets": (_extension_column, "huggingface"),
    "saved to disk": (_saved_to_disk, "huggingface"),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_code_in_a_data_set_is_not_run(tmp_path: Path, mark: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, option = DATA[name]
    folder = tmp_path / "rows"
    folder.mkdir()
    plant(folder, mark)
    if option == "huggingface":
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with suppress(DatasetError, ValueError):
        read_split(folder, "train", option)
    assert_not_run(mark)


def test_a_run_folders_configuration_builds_no_object(model: Path, tmp_path: Path, mark: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"name: !!python/object/apply:builtins.open [{mark}, w]\n")
    with pytest.raises(ConfigError):
        load_resolved(tmp_path / "config.yaml")
    assert CliRunner().invoke(app, ["export", str(tmp_path)]).exit_code == 2
    assert_not_run(mark)


WATCHED = """
import json, sys
names, is_on = set(), False

def watch(event, words):
    if is_on and event in ("pickle.find_class", "marshal.load", "marshal.loads", "exec"):
        own = event != "exec" or not getattr(words[0], "co_filename", "").startswith((sys.prefix, sys.base_prefix, "<"))
        if own:
            names.add(f"{event} {words!r}")

from pathlib import Path
import torch
from learner_data import tiny_config
from mobula.learner.learner import Learner
from mobula.learner.policy_weights import export_state
from mobula.learner.adapters.adapter import read_adapter_state, write_adapter_state
folder, model = Path(sys.argv[1]), Path(sys.argv[2])
config = tiny_config(model, "learner.ema_decay=0.5")
def read():
    learner.load(folder / "state")
    export_state(config, folder / "state", folder / f"export-{is_on}", merge=False, average=True)
    read_adapter_state(folder / "adapter")
learner = Learner(config, 0, 1, ())
learner.connect("")
learner.save(folder / "state")
learner.finish_save()
write_adapter_state(folder / "adapter", {"factors": {"a": torch.ones(2)}})
read()  # imports what it needs
sys.addaudithook(watch)
is_on = True
read()
is_on = False
print(json.dumps(sorted(names)))
print(json.dumps(sorted(str(p.relative_to(folder)) for p in (folder / "state").rglob("*") if p.is_file())))
"""


def test_a_resume_and_an_export_unpickle_no_name_at_all(model: Path, tmp_path: Path) -> None:
    """Python reports each name that a pickle of any library looks up, and each code object that is executed."""
    paths = [path for path in sys.path if path]
    script = f"import sys; sys.path[:0] = {paths!r}\n{WATCHED}"
    command = [sys.executable, "-c", script, str(tmp_path), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    names, files = map(json.loads, done.stdout.splitlines()[-2:])
    assert names == []
    assert files == [
        "state/algorithm.json", "state/average/rank_0.safetensors", "state/average/state.json",
        "state/rank_0.safetensors", "state/rng_0.pt", "state/state.json",
    ]  # fmt: skip
