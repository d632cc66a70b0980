"""Proxies of the environment: chosen by request, NO_PROXY first, and never for this machine."""

from __future__ import annotations

import os
import sys

import httpx
import pytest

from mobula.cluster.proxies import ProxiedTransport, bypass_loopback, proxied_transport, proxy_of


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
