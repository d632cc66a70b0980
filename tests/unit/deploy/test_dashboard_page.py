"""`mobula dashboard`: panels of the dashboards by way of a Prometheus, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_prometheus import FakePrometheus
from fastapi.testclient import TestClient
from http_servers import serving
from typer.testing import CliRunner

from cluster.errors import PreflightError
from deploy.cli import app
from deploy.dashboard.prometheus import Prometheus, legend, of_run
from deploy.dashboard.server import make_app, serve
from deploy.grafana.panels import DASHBOARDS, RUNS

NOW = 1_700_000_000.0


@pytest.fixture
def known() -> FakePrometheus:
    return FakePrometheus(["digits", "sums"])


@pytest.fixture
def client(known: FakePrometheus) -> Iterator[TestClient]:
    with serving(known.app) as running:
        page = make_app(Prometheus(running.url), now=lambda: NOW)
        with TestClient(page, base_url="http://127.0.0.1") as found:
            yield found


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_asks_the_queries_of_its_panels_and_no_others(
    client: TestClient, known: FakePrometheus, name: str
) -> None:
    answer = client.get(f"/panels/{name}", params={"run": "digits", "minutes": 60}).json()
    assert [panel["title"] for panel in answer["panels"]] == [panel.title for panel in DASHBOARDS[name]]
    expected = [query.expression for panel in DASHBOARDS[name] for query in panel.queries]
    assert sorted(known.queries) == sorted(text.replace(RUNS, 'run="digits"') for text in expected)


def test_points_are_numbers_on_the_grid_of_the_stretch(client: TestClient) -> None:
    answer = client.get("/panels/overview", params={"minutes": 60}).json()
    assert (answer["end"] - answer["start"], answer["step_s"]) == (3600, 15)
    assert NOW - 15 < answer["end"] <= NOW
    first, second = answer["panels"][0]["lines"]
    assert [first["label"], second["label"]] == ["digits", "sums"]
    times = [time for time, _ in first["points"]]
    assert len(times) == 240, "one of 241 is no number"
    assert all((time - answer["start"]) % 15 == 0 for time in times)


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/panels/nothing", 404, "it is one of overview"),
        ("/panels/overview?minutes=0", 422, "minutes=0 is not between"),
        ("/panels/overview?minutes=99999999", 422, "is not between"),
        ("/files/server.py", 404, "there is no file"),
    ],
)
def test_an_unfit_request_is_named(client: TestClient, path: str, status: int, said: str) -> None:
    reply = client.get(path)
    assert reply.status_code == status and said in reply.json()["detail"]


def test_what_prometheus_refuses_is_shown(client: TestClient, known: FakePrometheus) -> None:
    known.error = "query timed out"
    reply = client.get("/panels/overview")
    assert reply.status_code == 502 and "query timed out" in reply.json()["detail"]


def test_a_page_of_another_name_cannot_read_the_data(client: TestClient) -> None:
    assert client.get("/runs").json() == ["digits", "sums"]
    assert client.get("/runs", headers={"host": "elsewhere.example"}).status_code == 400


def test_the_page_allows_its_own_files_alone(client: TestClient) -> None:
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "https://" not in page.text and all(f'value="{name}"' in page.text for name in DASHBOARDS)
    assert client.get("/files/dashboard.js").headers["content-type"].startswith("text/javascript")


def test_the_name_of_a_run_cannot_leave_its_string() -> None:
    assert of_run(f"up{{{RUNS}}}", 'x"} or vector(1) #\\') == 'up{run="x\\"} or vector(1) #\\\\"}'
    assert of_run(f"up{{{RUNS}}}", "") == 'up{run=~".+"}'


def test_a_legend_is_filled_in_as_grafana_does() -> None:
    assert legend("{{role}}/{{index}} {{node}}", {"role": "rollout", "index": "1"}) == "rollout/1"


def test_an_address_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(PreflightError, match="is no address"):
        Prometheus("localhost:9090")
    with pytest.raises(PreflightError, match="user or password") as refused:
        Prometheus("http://me:s3cret@127.0.0.1:9090")
    assert "s3cret" not in str(refused.value)


def test_no_server_and_another_server_are_reported_before_anything_is_served(known: FakePrometheus) -> None:
    result = CliRunner().invoke(app, ["dashboard", "--prometheus", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "does not answer" in result.stderr and "mobula top" in result.stderr
    with serving(known.app) as running, pytest.raises(PreflightError, match="is no Prometheus: HTTP 404"):
        serve(f"{running.url}/elsewhere", 0, lambda text: None)


def test_a_port_in_use_is_refused(known: FakePrometheus) -> None:
    with serving(known.app) as running, pytest.raises(PreflightError, match=f"--port {running.port} is not free"):
        serve(running.url, running.port, lambda text: None)
