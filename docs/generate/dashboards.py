"""Write the dashboards as JSON for Grafana: `python -m docs.generate.dashboards`, with the extra `grafana`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from docs.generate.panels import DASHBOARDS, Panel
from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
SPAN, HEIGHT = 8, 8  # three charts a row of 24 columns


def text(name: str) -> str:
    """The JSON of one dashboard."""
    return JSONEncoder(sort_keys=True, indent=1).encode(_dashboard(name, DASHBOARDS[name]).build()) + "\n"


def _dashboard(name: str, panels: Sequence[Panel]) -> dashboard.Dashboard:
    board = (
        dashboard.Dashboard(f"Mobula: {name}")
        .uid(f"mobula-{name}")
        .tags(["mobula"])
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("run")
            .datasource(SOURCE)
            .query("label_values(ray_mobula_up, run)")
            .refresh(2)
            .include_all(True)
            .all_value(".*")
            .multi(True)
        )
    )
    for panel in panels:
        board = board.with_panel(_chart(panel))
    return board


def _chart(panel: Panel) -> timeseries.Panel:
    chart = timeseries.Panel().title(panel.title).unit(panel.unit).span(SPAN).height(HEIGHT).datasource(SOURCE)
    for query in panel.queries:
        chart = chart.with_target(prometheus.Dataquery().expr(query.expression).legend_format(query.legend))
    return chart


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    FOLDER.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"mobula_{name}.json").write_text(text(name), encoding="utf-8")
    logging.info("wrote %d dashboards to %s", len(DASHBOARDS), FOLDER)


if __name__ == "__main__":
    main()
