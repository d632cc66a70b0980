"""Dashboards and alert rules: every query names gauges that exist and gives a result; rules fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from docs.generate.panels import DASHBOARDS, RUNS

from mobula.cluster.metrics.definitions import CounterName, LiveName, MetricName, SplitName

REPOSITORY = Path(__file__).parents[3]
RULES = REPOSITORY / "deploy" / "prometheus" / "alerts.yaml"
JSON_FOLDER = REPOSITORY / "deploy" / "grafana" / "dashboards"
OURS = {
    **{str(metric): metric for metric in (*MetricName, *LiveName, *SplitName)},
    **{f"{counter}_total": counter for counter in CounterName},
}
QUERIES = [query for panels in DASHBOARDS.values() for panel in panels for query in panel.queries]
SERIES = re.compile(r"ray_mobula_(\w+)")
PROMTOOL = shutil.which("promtool")
ANY_RUN = 'run=~".*"'
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def promtool(folder: Path, tests: list[dict[str, Any]]) -> None:
    """Run Prometheus's own test of rules and expressions."""
    path = folder / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def exported() -> list[dict[str, str]]:
    """A series for each gauge, as Ray exports it: a count that grows, everything else at 1."""
    found = []
    for name, metric in OURS.items():
        is_count = name.endswith("_total")
        split = 'reason="all",' if is_count else f'{metric.tag}="x",' if metric.tag else ""
        labels = f'{split}run="r",role="rollout",index="0",WorkerId="w"'
        found.append({"series": f"ray_mobula_{name}{{{labels}}}", "values": "0+1x80" if is_count else "1+0x80"})
    return found


def test_queries_name_gauges_that_are_defined_and_keep_no_worker_id_of_ray() -> None:
    for expression in [query.expression for query in QUERIES] + [rule["expr"] for rule in rules()]:
        names = SERIES.findall(expression)
        assert all(name in OURS for name in names) and (names or "ray_node_" in expression), expression
        assert " by (" in expression, expression


@needs_promtool
def test_no_panel_is_empty(tmp_path: Path) -> None:
    """Each expression over one exported series of every gauge; `count(...) > bool 0` is 1 where there is a result."""
    checks = [
        {
            "expr": f"count({query.expression.replace(RUNS, ANY_RUN)}) > bool 0",
            "eval_time": "15m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for query in QUERIES
    ]
    promtool(tmp_path, [{"interval": "15s", "input_series": exported(), "promql_expr_test": checks}])


CONTROLLER, COUNT = 'role="controller",index="0",WorkerId="w"', 'reason="all"'


def gauge(name: str, values: str, labels: str = CONTROLLER) -> dict[str, str]:
    return {"series": f'ray_mobula_{name}{{run="r",{labels}}}', "values": values}


def workers(state: str, values: str) -> list[dict[str, str]]:
    return [gauge("workers", values, f'role="rollout",state="{state}"')]


DISK = {"series": 'ray_node_disk_utilization_percentage{ip="10.0.0.1"}', "values": "90+0x400"}
RUN, ROLE = {"run": "r"}, {"run": "r", "role": "rollout"}
FIRING: dict[str, tuple[str, str, list[dict[str, str]], dict[str, str]]] = {
    # alert: when it fires, when it does not, the series, and the labels that it keeps
    "MobulaStalled": ("70m", "50m", [gauge("up", "1+0x400"), gauge("last_step_time", "0+0x400")], RUN),
    "MobulaGone": ("12m", "4m", [gauge("up", "1+0x20 stale")], RUN),
    "MobulaStaleness": ("20m", "10m", [gauge("over_age_tokens", "5+0x400")], RUN),
    "MobulaRestarts": ("20m", "4m", [gauge("restarts_total", "0+0x20 0+1x10 10+0x400", COUNT)], RUN),
    "MobulaCanary": ("10m", "1m", [gauge("canary", "0.1+0x10 0.9+0x400")], RUN),
    "MobulaRewardHacking": ("10m", "1m", [gauge("guard_alarms_total", "0+0x10 1+0x400", COUNT)], RUN),
    "MobulaQuarantine": ("10m", "1m", workers("quarantined", "0+0x10 1+0x400"), ROLE),
    "MobulaNoWorker": ("25m", "10m", workers("serving", "2+0x10 0+0x400"), ROLE),
    "MobulaDisk": ("10m", "2m", [DISK], {"ip": "10.0.0.1"}),
}


def test_every_rule_has_a_case() -> None:
    assert sorted(FIRING) == sorted(rule["alert"] for rule in rules())


@needs_promtool
@pytest.mark.parametrize("alert", FIRING)
def test_an_alert_fires_when_it_should_and_not_before(alert: str, tmp_path: Path) -> None:
    """The expression of `ALERTS` decides which alerts fire: whatever the text of their annotations."""
    fires, quiet, series, labels = FIRING[alert]
    chosen = ",".join(f'{key}="{value}"' for key, value in labels.items())
    expr = f'count(ALERTS{{alertname="{alert}",alertstate="firing",{chosen}}})'
    checks = [
        {"expr": expr, "eval_time": fires, "exp_samples": [{"labels": "{}", "value": 1}]},
        {"expr": expr, "eval_time": quiet, "exp_samples": []},
    ]
    promtool(tmp_path, [{"interval": "15s", "input_series": series, "promql_expr_test": checks}])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_provisioned_files_hold_the_panels_of_today(name: str) -> None:
    found = json.loads((JSON_FOLDER / f"mobula_{name}.json").read_text(encoding="utf-8"))
    panels = [(p["title"], [(t["expr"], t["legendFormat"]) for t in p["targets"]]) for p in found["panels"]]
    expected = [(p.title, [(query.expression, query.legend) for query in p.queries]) for p in DASHBOARDS[name]]
    assert panels == expected, "run `python -m docs.generate.dashboards` with the extra `grafana`"
    assert found["uid"] == f"mobula-{name}" and found["templating"]["list"][1]["name"] == "run"


def test_the_provisioned_files_are_what_the_builder_writes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="the extra `grafana` is not installed")
    from docs.generate.dashboards import text

    for name in DASHBOARDS:
        assert (JSON_FOLDER / f"mobula_{name}.json").read_text(encoding="utf-8") == text(name)


def test_grafana_is_provisioned_with_the_dashboards_and_their_source() -> None:
    provisioning = REPOSITORY / "deploy" / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "mobula.yaml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert urlsplit(source["url"]).hostname == "127.0.0.1"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "mobula.yaml").read_text())["providers"]
    assert (provider["type"], provider["options"]) == ("file", {"path": "$MOBULA_DASHBOARDS"})
