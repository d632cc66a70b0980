"""Tasks of the user: directories with groups, found by MOBULA_TASKS, which choose like the built-in options."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mobula.configs.errors import ConfigError
from mobula.configs.groups import EXAMPLES, TASKS_VARIABLE, groups, roots
from mobula.configs.load import load_config


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of `examples/sums` under another name, in a directory whose name needs quotes."""
    folder = tmp_path / "it's, my task"
    for group in ("data", "experiment"):
        folder.joinpath(group).mkdir(parents=True)
        shutil.copy(EXAMPLES / "sums" / group / "sums.yaml", folder / group / "products.yaml")
    experiment = folder / "experiment" / "products.yaml"
    experiment.write_text(experiment.read_text().replace("/data: sums", "/data: products"))
    data = folder / "data" / "products.yaml"
    data.write_text(data.read_text().replace("data/sums", "data/products"))
    monkeypatch.setenv(TASKS_VARIABLE, str(folder))
    caches = (roots, groups)
    for cached in caches:
        cached.cache_clear()
    yield folder
    for cached in caches:
        cached.cache_clear()


def test_an_experiment_of_the_user_chooses_data_of_the_user(task: Path) -> None:
    config = load_config(["experiment=products"])
    assert config.data.path == Path("data/products")
    assert config.data.writer == "examples/sums/sums.py:write_sums"
    assert {"products", "sums"} <= set(groups()["experiment"])


def test_an_option_with_a_built_in_name_is_refused(task: Path) -> None:
    (task / "data" / "jsonl.yaml").write_text("kind: jsonl\n")
    with pytest.raises(ConfigError, match=r"data/jsonl\.yaml has the name of a built-in option of data: rename it"):
        load_config(["experiment=digits"])


def test_a_missing_directory_is_refused(task: Path) -> None:
    shutil.rmtree(task)
    with pytest.raises(ConfigError, match="which is no directory: correct or unset it"):
        load_config(["experiment=digits"])
