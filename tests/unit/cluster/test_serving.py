"""HTTP of all servers: who may ask, in which form, over how many connections; and the proxies of what we ask."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from episode_data import episode_config
from http_servers import reward_app
from training_roles import TinyEngines, TinyLearner
from training_server import LIMITS, make_service
from waiting import wait_until

from mobula.actors.environments.adapters.agent_endpoint import MAX_CONNECTIONS, AgentEndpoint
from mobula.actors.environments.server import EnvironmentServer
from mobula.actors.environments.server import make_app as environment_app
from mobula.cluster import serving
from mobula.cluster.proxies import ProxiedTransport, bypass_loopback, proxied_transport, proxy_of
from mobula.cluster.serving import Address, RequestGate, make_server, run_server
from mobula.deploy.training_service.app import make_app as training_app
from mobula.deploy.training_service.tenants import Tenants, tenant_gate
from mobula.rewards.contract import Score

JSON = "application/json"
SAMPLES = json.dumps({"samples": [{"response": "abc", "num_tokens": 1}]})
SESSION = json.dumps({"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"})


@contextmanager
def served(gate: RequestGate, max_connections: int = 100, host: str = "127.0.0.1") -> Iterator[int]:
    """The server in a thread, on a port that it yields."""
    listener = socket.create_server((host, 0))
    server = make_server(gate, listener, grace_s=1, max_connections=max_connections)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield server.server_port
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)


def ask(port: int, line: str, *headers: str, body: bytes = b"", own: str = "Host: 127.0.0.1") -> tuple[int, bytes]:
    """(status, content) of a request with these header lines and no others."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        heads = "\r\n".join([f"{line} HTTP/1.1", *([own] if own else []), "Connection: close", *headers])
        connection.sendall(heads.encode() + b"\r\n\r\n" + body)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


def sized(body: str, kind: str = "") -> list[str]:
    return [f"Content-Length: {len(body)}", *([f"Content-Type: {kind}"] if kind else [])]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """The servers without tokens."""
    config = episode_config(Path("model"), "environment.options={fault: ''}", "environment.host=inline").environment
    service = make_service(tmp_path_factory.mktemp("service"), TinyLearner(), TinyEngines())
    server, address = EnvironmentServer(config, idle_s=60), Address("127.0.0.1", 0, None)
    gates = {
        "rewards": reward_app(lambda request: Score(1.0)),
        "environments": RequestGate(environment_app(server), address, 1 << 20, 60.0),
        "training": tenant_gate(training_app(service), Tenants({}), LIMITS.max_request_bytes),
    }
    with ExitStack() as stack:
        yield {name: stack.enter_context(served(gate)) for name, gate in gates.items()}


ROUTES = [
    ("rewards", "POST /score", SAMPLES),
    ("environments", "POST /v1/sessions", ""),
    ("environments", "POST /v1/sessions", "{}"),
    ("training", "POST /api/v1/create_session", SESSION),
    ("training", "POST /api/v1/client/config", ""),
]


@pytest.mark.parametrize(("server", "line", "body"), ROUTES)
def test_a_page_of_another_site_changes_nothing(ports: dict[str, int], server: str, line: str, body: str) -> None:
    port, content = ports[server], body.encode()

    def status(*headers: str, own: str = "Host: 127.0.0.1") -> int:
        return ask(port, line, *headers, body=content, own=own)[0]

    fit = sized(body, JSON)
    assert status(*fit) == 200
    for host in ("other.example", "other.example:80", "localhost.other.example", "127.0.0.1.other.example", "10.0.0.1"):
        assert status(*fit, own=f"Host: {host}") == 421, "a name that was rebound to this machine"
    for host in ("localhost", f"127.0.0.1:{port}", "[::1]:80", "LOCALHOST.", "127.0.0.2"):
        assert status(*fit, own=f"Host: {host}") == 200
    for origin in ("http://other.example", "null", "http://127.0.0.1:1", "https://127.0.0.1.other.example", ""):
        assert status(*fit, f"Origin: {origin}") == 403
    assert status(*fit, "Origin: http://127.0.0.1") == 200, "a page of the server itself"
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""):
        assert status(*sized(body, kind)) == 415
    assert status(*sized(body, "Application/JSON; charset=utf-8")) == 200


def test_a_request_without_a_body_needs_what_a_page_cannot_set(ports: dict[str, int]) -> None:
    port = ports["training"]
    line = "POST /api/v1/client/config"
    assert ask(port, line)[0] == 415
    assert ask(port, line, "Content-Type: text/plain")[0] == 415
    assert ask(port, line, "X-API-Key: tml-anything")[0] == 200
    assert ask(port, line, "Authorization: Bearer x")[0] == 200
    assert ask(port, "GET /api/v1/sessions")[0] == 200


def test_a_host_header_is_there_once(ports: dict[str, int]) -> None:
    assert ask(ports["rewards"], "GET /health", own="")[0] in (400, 421)
    assert ask(ports["rewards"], "GET /health", "Host: 127.0.0.1")[0] in (400, 421)
    assert ask(ports["rewards"], "GET /health", own="Host: x@127.0.0.1")[0] == 421


def test_configured_names_are_answered() -> None:
    address = Address("127.0.0.1", 0, None, ("Rewards.example",))
    gate = RequestGate(reward_app(lambda request: Score(1.0)).app, address, 1 << 20, 5.0)
    with served(gate) as port:
        body = SAMPLES.encode()
        fit = sized(SAMPLES, JSON)
        assert ask(port, "POST /score", *fit, body=body, own="Host: rewards.example:8000")[0] == 200
        assert ask(port, "POST /score", *fit, "Origin: https://rewards.example", body=body)[0] == 200
        assert ask(port, "POST /score", *fit, body=body, own="Host: other.example")[0] == 421
    assert socket.gethostname().lower() in Address("0.0.0.0", 0, "token").hosts
    assert Address("127.0.0.1", 0, None).hosts == frozenset()


def test_lengths_that_are_none_are_refused(ports: dict[str, int]) -> None:
    for server, path in (("rewards", "/score"), ("environments", "/v1/sessions"), ("training", "/api/v1/telemetry")):
        for length in ("-1", "1x", "+1", "1, 2", ""):
            assert ask(ports[server], f"POST {path}", f"Content-Length: {length}", f"Content-Type: {JSON}")[0] == 400


def test_an_open_server_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    for token in (None, "a token"):
        caplog.clear()
        with Address("127.0.0.1", 0, token).listen() as listener:
            run_server(reward_app(lambda request: Score(1.0), token=token), listener, grace_s=1, announce=urls.append)
        assert ("there is no token" in caplog.text) == (token is None)
    assert len(urls) == 2


def test_connections_are_bounded_and_idle_ones_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "IDLE_S", 1.0)
    with served(reward_app(lambda request: Score(1.0)), max_connections=5) as port, ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(20)]
        idle[0].sendall(b"POST /score HT")  # a head that does not end
        began = time.monotonic()
        replies = [connection.recv(1 << 16) for connection in idle]
        assert time.monotonic() - began < 15
        assert sum(reply.startswith(b"HTTP/1.1 503") for reply in replies) >= 15
        assert replies[0] == b""
        assert ask(port, "GET /health")[0] == 200


def kept_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def endpoint() -> Iterator[AgentEndpoint]:
    made = AgentEndpoint()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("", ["Content-Length: -1"]),
        ("/guess", ["Content-Length: 67108864"]),
        ("/guess", ["Transfer-Encoding: chunked"]),
        ("", ["Content-Length: 671088640"]),
        ("", ["Content-Length: 67108864", "Origin: http://other.example"]),
        ("", ["Content-Length: 67108864", "Content-Type: text/plain"]),
    ],
)
def test_the_agent_endpoint_keeps_no_refused_byte(endpoint: AgentEndpoint, path: str, headers: list[str]) -> None:
    talk = endpoint.open()
    url = path or talk.url.partition("/v1")[0].rpartition("/")[2]
    port = int(talk.url.split(":")[2].partition("/")[0])
    target = path or f"/{url}/v1/chat/completions"
    chunk = b"x" * (1 << 20)
    before = kept_bytes()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        heads = [f"POST {target} HTTP/1.1", "Host: 127.0.0.1", *headers]
        connection.sendall("\r\n".join(heads).encode() + b"\r\n\r\n")
        try:
            for _ in range(48):
                connection.sendall(b"100000\r\n" + chunk + b"\r\n" if "chunked" in headers[0] else chunk)
        except OSError:
            pass  # refused and closed at once
        assert kept_bytes() - before < 24 << 20
    assert talk.events.empty()


def test_the_agent_endpoint_takes_chunks_and_bounds_its_connections_with_one_thread(endpoint: AgentEndpoint) -> None:
    talk = endpoint.open()
    port = int(talk.url.split(":")[2].partition("/")[0])
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    threads = threading.active_count()
    with ExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        time.sleep(0.5)
        assert threading.active_count() == threads
    time.sleep(0.5)
    replies: list[tuple[int, bytes]] = []
    path = talk.url.partition(str(port))[2]
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    heads = ("Transfer-Encoding: chunked", f"Content-Type: {JSON}")
    line = f"POST {path}/chat/completions"
    asker = threading.Thread(target=lambda: replies.append(ask(port, line, *heads, body=chunked)))
    asker.start()
    call: Any = talk.events.get(timeout=20)
    call.answer("good day", is_cut=False)
    asker.join(20)
    assert replies[0][0] == 200 and json.loads(replies[0][1])["choices"][0]["message"]["content"] == "good day"
    assert ask(port, line, f"Content-Type: {JSON}")[0] == 400, "no length: no body"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "url", "expected"),
    [
        ({}, "http://far/a.png", None),
        ({"HTTP_PROXY": "http://p:1"}, "http://far/a.png", ("HTTP_PROXY", "http://p:1")),
        ({"http_proxy": "http://p:1"}, "http://far/a.png", ("http_proxy", "http://p:1")),
        ({"HTTP_PROXY": "http://p:1"}, "https://far/a.png", None),
        ({"HTTPS_PROXY": "http://s:1", "ALL_PROXY": "http://p:1"}, "https://far/a.png", ("HTTPS_PROXY", "http://s:1")),
        ({"ALL_PROXY": "socks5://p:1"}, "https://far/a.png", ("ALL_PROXY", "socks5://p:1")),
        ({"ALL_PROXY": "socks5://p:1", "NO_PROXY": "far"}, "https://far/a.png", None),
        ({"ALL_PROXY": "socks5://p:1", "NO_PROXY": ".far.org"}, "https://a.far.org/a.png", None),
        ({"ALL_PROXY": "socks5://p:1", "no_proxy": "*"}, "https://far/a.png", None),
        ({"HTTP_PROXY": "p:1"}, "http://far/a.png", ("HTTP_PROXY", "http://p:1")),
        ({"http_proxy": " u:secret@p:1\n"}, "http://far/a.png", ("http_proxy", "http://u:secret@p:1")),
        ({"HTTP_PROXY": "p:1", "NO_PROXY": "far, 10.0.0.0/8"}, "http://10.1.2.3/a.png", None),
        ({"HTTP_PROXY": "p:1", "NO_PROXY": "10.0.0.0/8"}, "http://11.1.2.3/a.png", ("HTTP_PROXY", "http://p:1")),
        ({"HTTP_PROXY": "p:1", "NO_PROXY": "fd00::/8"}, "http://[fd00::1]/a.png", None),
        ({"ALL_PROXY": "socks5://p:1"}, "http://127.0.0.1:8000/v1", None),
        ({"ALL_PROXY": "socks5://p:1"}, "http://localhost:8000/v1", None),
        ({"ALL_PROXY": "socks5://p:1"}, "http://[::1]:8000/v1", None),
    ],
)
def test_the_proxy_of_a_url(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str, expected: tuple[str, str] | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(httpx.URL(url)) == expected


def test_a_socks_proxy_without_its_package_is_named_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", "socks5://user:secret@p:1")
    with pytest.raises(httpx.ProxyError, match=r"ALL_PROXY=socks5://.*socksio is not installed: pip install") as raised:
        httpx.Client(transport=ProxiedTransport()).get("http://far/a.png")
    assert "secret" not in str(raised.value)


def test_a_proxy_of_an_unknown_kind_is_named_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "gopher://p:1")
    with pytest.raises(httpx.ProxyError, match="HTTP_PROXY=gopher://p:1 is no proxy"):
        proxied_transport(httpx.URL("http://far/a.png"))


def test_loopback_addresses_are_added_where_a_proxy_is_set() -> None:
    assert bypassed({"PATH": "/bin"}) == {"PATH": "/bin"}
    both = bypassed({"http_proxy": "http://p:1", "no_proxy": "far, localhost"})
    assert both["NO_PROXY"] == both["no_proxy"] == "far,localhost,127.0.0.1,::1"
    assert bypassed({"ALL_PROXY": "http://p:1", "NO_PROXY": "*"})["NO_PROXY"] == "*"
    unequal = bypassed({"HTTP_PROXY": "http://p:1", "NO_PROXY": "far,a", "no_proxy": "a,near"})
    assert unequal["NO_PROXY"] == unequal["no_proxy"] == "far,a,near,localhost,127.0.0.1,::1"


def bypassed(environment: dict[str, str]) -> dict[str, str]:
    bypass_loopback(environment)
    return environment
