"""A real Prometheus scrapes a real run, which is traced, on a Ray head: every panel of every dashboard shows something.

PROMETHEUS names the program where it is not called `prometheus`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.generate.panels import DASHBOARDS, RUNS, Query
from jobs import PROMPTS_PER_STEP, REPOSITORY, Job
from ray_apart import START_S, dashboard_head, free_port
from waiting import is_served, wait_until

from mobula.cluster.tracing.tracer import Stage

PROMETHEUS = shutil.which(os.environ.get("PROMETHEUS", "prometheus"))
RULES = REPOSITORY / "deploy" / "prometheus" / "alerts.yaml"
GPU_PANELS = {("workers", "Busy GPUs"), ("workers", "GPU memory")}
SCRAPE_S = 2
NUM_STEPS = 200  # Ray exports every 10 s, and `increase` needs two values 15 s apart: some 40 s on a quiet machine
SERVICES = "prom_metrics_service_discovery.json"  # which Ray keeps in its temporary folder
WORDS = (
    "experiment=digits", f"num_steps={NUM_STEPS}", "algorithm.kl.coef=0.01", "algorithm.max_staleness=1",
    "weight_sync.canary_interval=1", "metrics.heartbeat_s=2", "supervision.interval_s=2", "tracing.exporter=file",
    "tracing.chrome_steps=[5]", "tracing.profile_steps=[3]",
)  # fmt: skip
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here (Debian: prometheus); PROMETHEUS may name it"),
]


@dataclass(frozen=True)
class Line:
    """One line of a panel."""

    label: str
    values: list[float]


@dataclass(frozen=True)
class Scraped:
    """A run that is over, and the server that watched it."""

    url: str
    start: float
    end: float
    run_folder: Path

    def lines(self) -> dict[tuple[str, str], list[Line]]:
        """(dashboard, panel) -> its lines over the time of the run."""
        return {
            (name, panel.title): [line for query in panel.queries for line in self._lines_of(query)]
            for name, panels in DASHBOARDS.items()
            for panel in panels
        }

    def _lines_of(self, query: Query) -> Iterator[Line]:
        expression = query.expression.replace(RUNS, 'run="job"')
        words = urllib.parse.urlencode({"query": expression, "start": self.start, "end": self.end, "step": 5})
        for series in self.asked(f"/api/v1/query_range?{words}")["result"]:
            values = [value for _, text in series["values"] if math.isfinite(value := float(text))]
            if values:
                yield Line(legend(query.legend, series["metric"]), values)

    def asked(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=20) as answer:
            return json.load(answer)["data"]


def legend(template: str, labels: Mapping[str, str]) -> str:
    """Fills in the labels as Grafana does; a label that the series lacks is empty."""
    return re.sub(r"\{\{(\w+)\}\}", lambda field: labels.get(field[1], ""), template).strip()


def prometheus(folder: Path, port: int, services: Path) -> subprocess.Popen[bytes]:
    """Started as an administrator does, with the rules of this repository."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "5s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "ray", "file_sd_configs": [{"files": [str(services)], "refresh_interval": f"{SCRAPE_S}s"}]}
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with (folder / "prometheus.log").open("w") as log:
        return subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    own = free_port()
    url = f"http://127.0.0.1:{own}"
    reward = f"rewards.components.0.function={folder / 'job_reward.py'}:score"  # the head has no path of the driver's
    with dashboard_head(num_cpus=2) as head:
        words = (f"data.path={folder / 'digits'}", f"resources.address={head.address}", reward)
        services = head.sessions / SERVICES
        wait_until(services.is_file, START_S, lambda: f"{SERVICES} of the head")
        head.processes.append(prometheus(folder, own, services))
        wait_until(lambda: is_served(f"{url}/-/ready"), START_S, lambda: (folder / "prometheus.log").read_text())
        start = time.time()
        with Job(folder, (*WORDS, *words)) as job:
            job.finish(job.start())
            yield Scraped(url, start, time.time(), job.run_folder)


def test_no_panel_of_a_real_run_is_empty(scraped: Scraped) -> None:
    lines = scraped.lines()
    assert {panel for panel, found in lines.items() if not found} == GPU_PANELS, "GPU panels need an NVIDIA GPU"
    assert all(len(line.values) >= 2 for found in lines.values() for line in found)


def test_the_numbers_are_those_of_the_run(scraped: Scraped) -> None:
    lines = scraped.lines()
    reached = {line.label: max(line.values) for line in lines["overview", "Step"]}
    assert NUM_STEPS / 2 <= reached["job"] <= NUM_STEPS == reached["job of"], "the last seconds may not be exported"
    phases = {line.label for line in lines["overview", "Phase"]}
    assert phases > {"job starting"}, "and some of those that a step goes through, which are looked at now and then"
    engines = {line.label.split()[0] for line in lines["rollout", "Sampled tokens/s by engine"]}
    assert engines == {"rollout/0", "rollout/1"}
    memory = {line.label.split()[0]: max(line.values) for line in lines["workers", "Host memory"]}
    assert set(memory) >= {"rollout/0", "rollout/1", "learner/0", "learner/1", "reference/0", "reward/0"}
    assert min(memory.values()) > 50e6
    assert len({line.label.split()[1] for line in lines["workers", "Host memory"]}) == 1, "each names its node"


def test_prometheus_takes_the_rules_and_none_fires_for_a_good_run(scraped: Scraped) -> None:
    groups = scraped.asked("/api/v1/rules")["groups"]
    [ours] = groups
    assert len(ours["rules"]) == 8 and {rule["health"] for rule in ours["rules"]} == {"ok"}
    alerts = scraped.asked("/api/v1/alerts")["alerts"]
    firing = {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
    assert firing <= {"MobulaDisk"}, "the disk is that of the machine"


def test_every_trained_prompt_has_its_stages(scraped: Scraped) -> None:
    lines = (scraped.run_folder / "traces" / "spans.jsonl").read_text().splitlines()
    spans = [json.loads(line) for line in lines]
    trained = [span for span in spans if span["attributes"].get("mobula.outcome") == Stage.TRAINED]
    assert len(trained) == NUM_STEPS * PROMPTS_PER_STEP
    for root in trained:
        children = [span["name"] for span in spans if span["parent_id"] == root["context"]["span_id"]]
        assert children == list(Stage)
    assert sum(span["name"] == "step" for span in spans) == NUM_STEPS


def test_a_step_and_the_updates_of_all_ranks_can_be_opened(scraped: Scraped) -> None:
    folder = scraped.run_folder / "traces"
    step = json.loads((folder / "step-000005.json").read_text())["traceEvents"]
    assert {"step", "update", "wait_for_rollouts", "generated", "trained"} <= {event["name"] for event in step}
    profiles = sorted(path.name for path in folder.glob("update-*.json"))
    assert profiles == ["update-000003-rank-0.json", "update-000003-rank-1.json"]
    for name in profiles:
        operators = {event["name"] for event in json.loads((folder / name).read_text())["traceEvents"]}
        assert "aten::mm" in operators
