"""`mobula serve-rewards`: the reward functions of a file behind HTTP, until the process is told to stop."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import yaml
from pydantic import ValidationError

from cluster.errors import PreflightError
from configs.load import ConfigError
from configs.schema import RewardsConfig
from rewards.combine import Component, build_components
from rewards.contract import Failure, Outcome, RewardRequest, Score, evaluate_batch
from rewards.http.lanes import Lanes
from rewards.http.server import RewardService, ServerLimits, make_app
from rewards.isolated import IsolatedProcess
from rewards.tools import Tools

PENDING_CONNECTIONS = 512
START_TIMEOUT_S = 120.0  # to import what a reward function needs; a request's own deadline comes first


@dataclass(frozen=True)
class ServeOptions:
    """What `serve-rewards` was told."""

    host: str
    port: int
    token: str | None
    lanes: int
    max_waiting: int
    timeout_s: float
    max_request_bytes: int
    device: str
    dtype: str


class ComponentScorer:
    """One lane's own components: their weighted sum, with each component's value in the breakdown."""

    def __init__(self, config: RewardsConfig, options: ServeOptions) -> None:
        self._isolated = IsolatedProcess(timeout_s=options.timeout_s, start_timeout_s=START_TIMEOUT_S)
        self._components = build_components(config.components, Tools(self._isolated, options.device, options.dtype))

    def score(self, requests: Sequence[RewardRequest], deadline: float) -> list[Outcome]:
        self._isolated.deadline = deadline
        columns = [evaluate_batch(component.function, requests) for component in self._components]
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        self._isolated.close()

    def _sum(self, row: Sequence[Outcome]) -> Outcome:
        parts: list[tuple[Component, Score]] = []
        for component, outcome in zip(self._components, row, strict=True):
            if isinstance(outcome, Failure):
                return Failure(outcome.kind, f"component {component.name!r}: {outcome.reason}")
            parts.append((component, outcome))
        return Score(
            math.fsum(component.weight * score.value for component, score in parts),
            "; ".join(f"{component.name}: {score.reason}" for component, score in parts if score.reason),
            {component.name: score.value for component, score in parts},
        )


def serve(path: Path, options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; what is in flight then is finished first. `announce` is told the URL.

    Raises:
        ConfigError: the file is unfit, or names an unfit reward function.
        PreflightError: the address is taken or not ours.
    """
    config = read_rewards(path)
    try:
        scorers = [ComponentScorer(config, options) for _ in range(options.lanes)]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    listener = _listen(options.host, options.port)
    host = f"[{options.host}]" if ":" in options.host else options.host
    limits = ServerLimits(options.timeout_s, options.max_request_bytes)
    app = make_app(RewardService(Lanes(scorers, max_waiting=options.max_waiting), limits), options.token)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=math.ceil(2 * options.timeout_s))
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # the server raises what stopped it again once it is done
        signal.signal(number, lambda *_: None)
    announce(f"http://{host}:{listener.getsockname()[1]}")
    server.run(sockets=[listener])


def read_rewards(path: Path) -> RewardsConfig:
    """A file in the form of a run's `rewards` section, or a whole configuration that has one.

    Raises:
        ConfigError: it cannot be read, or a key of it is unknown, missing or unfit.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a YAML file of rewards") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML ({' '.join(str(error).split())}): mend it") from error
    section = values.get("rewards", values) if isinstance(values, dict) else values
    try:
        return RewardsConfig.model_validate_json(json.dumps(section), strict=True)
    except (ValidationError, TypeError) as error:
        details = error.errors() if isinstance(error, ValidationError) else [{"loc": (), "msg": str(error)}]
        lines = (f"{'.'.join(map(str, d['loc'])) or 'the file'}: {d['msg']}" for d in details)
        raise ConfigError(f"{path} is no rewards section: {'; '.join(lines)}") from error


def read_token(env: str | None, file: Path | None) -> str | None:
    """The bearer token from an environment variable or a file; None if neither is named.

    Raises:
        ConfigError: the one that is named holds none, or both are.
    """
    if env is not None and file is not None:
        raise ConfigError("--token-env and --token-file are two places for one token: give one of them")
    if env is None and file is None:
        return None
    try:
        token = os.environ.get(env, "") if env is not None else Path(str(file)).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file} cannot be read ({error}): give a file with the token") from error
    if not token:
        raise ConfigError(f"{env or file} holds no token: set it before the server starts")
    return token


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=PENDING_CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise PreflightError(f"{host}:{port} cannot be listened on ({error}): give another --host or --port") from error
