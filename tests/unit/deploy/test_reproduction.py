"""`reproduce=RUN`: the configuration of a run, and what differs from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audited import PROVENANCE

from mobula.cluster.audit.observer import RunAudit
from mobula.cluster.audit.writer import ChainWriter
from mobula.configs.errors import ConfigError
from mobula.configs.load import dump_config, load_config
from mobula.deploy.run.overview import code, machine, packages, reproduction

WORDS = ("experiment=digits", "resources=laptop", "seed=3", "algorithm.kl.coef=0.25", "resume=auto")


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    folder.mkdir()
    config = load_config([*WORDS, "name=first", f"folder={tmp_path}"])
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    return folder


def test_a_run_that_reproduces_another_has_its_keys_and_a_name_of_its_own(origin: Path) -> None:
    first = load_config([*WORDS, "name=first", f"folder={origin.parent}"])
    again = load_config([f"reproduce={origin}"])
    assert (again.name, again.resume, again.reproduce) == ("first-again", "never", str(origin))
    own = {"name": first.name, "resume": first.resume, "reproduce": ""}
    assert again.model_copy(update=own) == first


def test_further_words_win_and_groups_are_refused(origin: Path) -> None:
    again = load_config([f"reproduce={origin}", "seed=4", "name=other", "resume=auto"])
    assert (again.seed, again.name, again.resume, again.algorithm.kl.coef) == (4, "other", "auto", 0.25)
    with pytest.raises(ConfigError, match="chooses a group"):
        load_config([f"reproduce={origin}", "resources=gpu_1"])
    with pytest.raises(ConfigError, match=r"reproduce=nowhere: there is no config\.yaml"):
        load_config(["reproduce=nowhere"])


def test_words_packages_and_data_that_differ_are_named(origin: Path, caplog: pytest.LogCaptureFixture) -> None:
    was: dict[str, Any] = {**PROVENANCE, "packages": {"torch": "1", "ray": "2"}, "data": {"rows": "a"}}
    audit = RunAudit(ChainWriter(origin), origin)
    audit.started(was)
    config = load_config([f"reproduce={origin}", "seed=4"])
    now = was | {"packages": {"torch": "1", "ray": "3"}, "data": {"rows": "b"}}
    found = reproduction(config, now)["reproduces"]
    assert found == {
        "run": str(origin),
        "differences": {"seed": [3, 4], "packages.ray": ["2", "3"], "data.rows": ["a", "b"]},
    }
    assert all(text in caplog.text for text in ("seed=4 (was 3)", "packages.ray=3 (was 2)", "data.rows=b (was a)"))
    assert reproduction(load_config([f"reproduce={origin}"]), was)["reproduces"]["differences"] == {}


def test_code_packages_and_machine_are_functions_of_this_environment() -> None:
    assert code() == code()
    assert len(code()["sha256"]) == 64
    assert {"torch", "ray", "transformers"} <= packages().keys()
    assert machine()["num_cores"] >= 1
