"""Tenants: access tokens of the users of a service."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from starlette.types import ASGIApp, Scope

from mobula.cluster.serving import Headers, RefusalError, RequestGate
from mobula.configs.errors import ConfigError

PREFIX = "tml-"  # the client sends no other tokens
LOCAL = "local"  # the tenant of a service without tokens
OPEN_PATHS = ("/api/v1/healthz", "/health")
SIGNED_PATHS = "/files/"  # addresses that hold a signature
MEDIA_TYPES = {"/api/v1/forward_backward": "application/x-protobuf"}  # of bodies that are not JSON
READ_S = 120.0  # of the body of one request


@dataclass(frozen=True)
class Tenants:
    """Implements `Access`: tenant -> token. Without tokens every request is of the tenant `local`."""

    tokens: Mapping[str, str]
    hosts: frozenset[str] = frozenset()

    @property
    def is_open(self) -> bool:
        return not self.tokens

    def check(self, scope: Scope, headers: Headers) -> None:
        """Adds the tenant to the request.

        Raises:
            RefusalError: its token is unknown.
        """
        tenant = self.tenant_of(headers.get(b"x-api-key", b"").decode("latin-1"))
        if tenant is None and scope["path"] not in OPEN_PATHS and not scope["path"].startswith(SIGNED_PATHS):
            raise RefusalError(401, "this API key is not known here: set TINKER_API_KEY, or give api_key=...")
        scope.setdefault("state", {})["tenant"] = tenant

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


def tenant_gate(app: ASGIApp, tenants: Tenants, max_request_bytes: int) -> RequestGate:
    """Returns the service behind its gate."""
    return RequestGate(app, tenants, max_request_bytes, READ_S, MEDIA_TYPES)
