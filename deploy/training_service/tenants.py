"""Tenants of the training service with their limits, futures and errors."""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import yaml
from starlette.requests import Request
from starlette.types import ASGIApp, Scope

from mobula.cluster.serving import Headers, RefusalError, RequestGate
from mobula.configs.errors import ConfigError
from mobula.configs.schema import RunConfig
from mobula.configs.schema.resources import TrainingServiceConfig
from mobula.deploy.training_service.store import RequestOutcome


class RefusedRequestError(Exception):
    """A request that is answered with an HTTP status and leaves no trace. The client raises the error of this status.

    A request of a model with a sequence number never gets one for its content: the client counts it, and the model
    would wait for its number.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class RequestError(ValueError):
    """A request that is accepted and cannot be executed. Its future fails with the client's category `user`."""


def not_found(what: str, name: str) -> RefusedRequestError:
    """Returns the error of an object that does not exist or belongs to another tenant."""
    return RefusedRequestError(404, f"there is no {what} {name!r}, or it belongs to another tenant")


class Futures:
    """Outcomes by request id. The newest finished ones stay in memory; older ones are in the database."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._waiting: dict[str, asyncio.Future[RequestOutcome]] = {}
        self._finished: OrderedDict[str, RequestOutcome] = OrderedDict()

    def open(self, request_id: str) -> None:
        if request_id not in self._waiting and request_id not in self._finished:
            self._waiting[request_id] = asyncio.get_running_loop().create_future()

    def finish(self, request_id: str, outcome: RequestOutcome) -> None:
        future = self._waiting.pop(request_id, None)
        self._finished[request_id] = outcome
        while len(self._finished) > self._num_kept:
            self._finished.popitem(last=False)
        if future is not None:
            future.set_result(outcome)

    def is_known(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self._finished

    async def wait(self, request_id: str, timeout_s: float) -> RequestOutcome | None:
        """Returns the outcome of a known request; None if it does not finish in time."""
        finished = self._finished.get(request_id)
        if finished is not None:
            return finished
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._waiting[request_id])
        except TimeoutError:
            return None

    def forget(self, request_id: str) -> None:
        self._finished.pop(request_id, None)


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
        """Adds the tenant to the request."""
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


def tenant_of(request: Request) -> str:
    tenant: str = request.state.tenant
    return tenant


def read_tenants(file: Path | None) -> Tenants:
    """Reads a YAML file of `tenant: token` lines; None gives a service without tokens."""
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
    return RequestGate(app, tenants, max_request_bytes, READ_S, MEDIA_TYPES)


MAX_CHECKPOINTS = 4096  # of whole weights that can be sampled: engines hold one of them and load the others from disk


class ServiceLimits(TrainingServiceConfig):
    """The keys of `training_service`, and the bounds that follow from other keys."""

    max_rank: int
    """Of an adapter."""
    max_served: int
    """Adapters that the engines hold at once."""
    learner_s: float
    """Deadline of one call of the learner."""
    sample_s: float
    """Deadline of one sampling request."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        own, timeouts, adapters = config.training_service, config.timeouts, config.sampler.adapters
        is_full = own.weights == "full"
        return cls(
            **dict(own) | {"max_models": 1 if is_full else own.max_models},
            max_rank=adapters.max_rank,
            max_served=MAX_CHECKPOINTS if is_full else adapters.max_served,
            learner_s=timeouts.start_s + timeouts.update_s,  # ranks that were lost start again within a call
            sample_s=own.recovery_s + timeouts.rollout_s,
        )
