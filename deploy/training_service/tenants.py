"""Tenants: access tokens of the users of a service, and the gate that checks them."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mobula.configs.errors import ConfigError

PREFIX = "tml-"  # the client sends no other tokens
LOCAL = "local"  # the tenant of a service without tokens
OPEN_PATHS = ("/api/v1/healthz", "/health")
SIGNED_PATHS = "/files/"  # addresses that hold a signature

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Tenants:
    """Tenant -> token. Without tokens every request is of the tenant `local`."""

    tokens: Mapping[str, str]

    def tenant_of(self, token: str) -> str | None:
        """Returns the tenant of a token; None for an unknown one. Takes the same time for every token."""
        if not self.tokens:
            return LOCAL
        found = None
        for tenant, known in self.tokens.items():
            if hmac.compare_digest(known.encode(), token.encode()):
                found = tenant
        return found


def read_tenants(file: Path | None) -> Tenants:
    """Reads a YAML file of `tenant: token` lines; None gives a service without tokens.

    Raises:
        ConfigError: the file cannot be read, or a token is unfit.
    """
    if file is None:
        return Tenants({})
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--tenants {file} cannot be read ({error}): give a file of `tenant: token` lines") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"--tenants {file} has no `tenant: token` lines: add one for each tenant")
    for tenant, token in content.items():
        if not (isinstance(tenant, str) and isinstance(token, str) and token.startswith(PREFIX) and len(token) >= 20):
            raise ConfigError(
                f"--tenants {file}: the token of {tenant} is not fit: the client sends tokens that begin with "
                f"{PREFIX!r}, and one of fewer than 20 characters can be guessed"
            )
    if len(set(content.values())) < len(content):
        raise ConfigError(f"--tenants {file}: two tenants have the same token: give each its own")
    return Tenants(content)


@dataclass(frozen=True)
class TenantGate:
    """ASGI middleware: answers 401 to requests without a known token, and adds the tenant to the others."""

    app: App
    tenants: Tenants

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            token = headers.get(b"x-api-key", b"").decode("latin-1")
            tenant = self.tenants.tenant_of(token)
            is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(SIGNED_PATHS)
            if tenant is None and not is_open:
                await _refuse(send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self.app(scope, receive, send)


async def _refuse(send: Send) -> None:
    detail = "this API key is not known here: set TINKER_API_KEY, or give api_key=..."
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
