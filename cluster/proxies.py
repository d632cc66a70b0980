"""Selects the HTTP proxy of each request from HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.

Requests to loopback addresses never use a proxy.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from urllib.request import (  # type: ignore[attr-defined]  # typeshed does not declare proxy_bypass_environment
    getproxies_environment,
    proxy_bypass_environment,
)

import httpx

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
NO_PROXY = ("NO_PROXY", "no_proxy")  # some programs read only one of them


def bypass_loopback(environment: MutableMapping[str, str]) -> None:
    """Adds the loopback addresses to NO_PROXY if a proxy is set, for other libraries and programs."""
    if not any(name.lower().endswith("_proxy") and name not in NO_PROXY for name in environment):
        return
    named = ",".join(environment.get(name, "") for name in NO_PROXY)
    hosts = list(dict.fromkeys(host.strip() for host in named.split(",") if host.strip()))
    if "*" not in hosts:
        hosts += [host for host in LOOPBACK_HOSTS if host not in hosts]
    for name in NO_PROXY:
        environment[name] = ",".join(hosts)


def proxy_of(url: httpx.URL) -> tuple[str, str] | None:
    """Returns the variable and its proxy for a URL; None for a direct connection."""
    proxies = getproxies_environment()
    host = url.host if ":" not in url.host else f"[{url.host}]"
    if is_loopback(url.host) or proxy_bypass_environment(host, proxies) or _is_in_network(url.host, proxies):
        return None
    name = next((scheme for scheme in (url.scheme, "all") if scheme in proxies), None)
    if name is None:
        return None
    variable = next(key for key in os.environ if key.lower() == f"{name}_proxy")
    proxy = proxies[name].strip()
    return variable, proxy if "://" in proxy else f"http://{proxy}"  # as in curl


def proxied_transport(url: httpx.URL) -> httpx.HTTPTransport:
    variable_and_proxy = proxy_of(url)
    if variable_and_proxy is None:
        return httpx.HTTPTransport()
    variable, proxy = variable_and_proxy
    shown = httpx.URL(proxy).copy_with(username=None, password=None) if "@" in proxy else proxy
    try:
        return httpx.HTTPTransport(proxy=proxy)
    except ImportError as error:
        raise httpx.ProxyError(
            f"{variable}={shown} is a SOCKS proxy, for which the package socksio is not installed: "
            f"pip install 'httpx[socks]', or add {url.host} to NO_PROXY"
        ) from error
    except (ValueError, httpx.InvalidURL) as error:
        raise httpx.ProxyError(f"{variable}={shown} is no proxy ({error}): correct or unset it") from error


class ProxiedTransport(httpx.BaseTransport):
    """Sends each request, including redirects, through the environment's proxy for its host."""

    def __init__(self) -> None:
        self._transports: dict[tuple[str, str] | None, httpx.HTTPTransport] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        proxy = proxy_of(request.url)
        if proxy not in self._transports:
            self._transports[proxy] = proxied_transport(request.url)
        return self._transports[proxy].handle_request(request)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()


def _is_in_network(host: str, proxies: Mapping[str, str]) -> bool:
    """Whether NO_PROXY lists a network that contains the address, such as 10.0.0.0/8. urllib ignores networks."""
    for name in proxies.get("no", "").split(","):
        with suppress(ValueError):  # the entry is not a network, or `host` is a name
            if "/" in name and ipaddress.ip_address(host) in ipaddress.ip_network(name.strip(), strict=False):
                return True
    return False


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
