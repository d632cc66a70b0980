"""RemoteEnvironment: an environment on an HTTP server (`mobula serve-environment`)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from typing import Any

import httpx

from mobula.actors.environments.base import Action, EnvironmentSpec, EpisodeError, Reset, Step
from mobula.actors.environments.wire import (
    Json,
    action_to_json,
    reset_from_json,
    spec_from_json,
    step_from_json,
)

PAUSE_S, MAX_PAUSE_S = 0.1, 2.0  # delay between attempts: random up to PAUSE_S, doubled up to MAX_PAUSE_S
QUOTED_CHARS = 300


class RemoteEnvironment:
    """One session on the server. A call without a reply is retried until the timeout, under the same number.

    Raises:
        EpisodeError: `server_unreachable`: no reply before the timeout; `server_refused`: an HTTP error;
            `session_lost`: the server does not know the session, for instance after a restart; or an error of the
            environment.
    """

    spec: EnvironmentSpec

    def __init__(
        self,
        name: str,
        url: str,
        *,
        token_env: str,
        start_timeout_s: float,
        reset_timeout_s: float,
        step_s: float,
    ) -> None:
        self._url = url.rstrip("/")
        self._timeouts = {"start": start_timeout_s, "reset": reset_timeout_s, "step": step_s, "demonstrate": step_s}
        self._client = httpx.Client(headers=_headers(token_env), trust_env=False)
        self._call = 0
        try:
            opened = self._post("start", "/v1/sessions", {})
            if opened["name"] != name:
                raise EpisodeError("server_refused", f"{url} serves environment {opened['name']}, not {name}")
        except BaseException:
            self._client.close()
            raise
        self._session = f"/v1/sessions/{opened['session']}"
        self.spec = spec_from_json(opened["spec"])

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        return reset_from_json(self._called("reset", {"seed": seed, "options": dict(options)}))

    def step(self, action: Action) -> Step:
        return step_from_json(self._called("step", {"action": action_to_json(action)}))

    def demonstrate(self) -> str:
        return str(self._called("demonstrate", {}))

    def close(self) -> None:
        try:
            self._client.delete(f"{self._url}{self._session}", timeout=self._timeouts["step"])
        except httpx.HTTPError:
            """The server ends sessions without calls."""
        self._client.close()

    def _called(self, method: str, given: Json) -> Any:
        self._call += 1
        return self._post(method, f"{self._session}/{method}", {"call": self._call, **given})["result"]

    def _post(self, what: str, path: str, body: Json) -> Json:
        deadline = time.monotonic() + self._timeouts[what]
        pause_s = PAUSE_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                reply = self._client.post(f"{self._url}{path}", json=body, timeout=max(0.01, left_s))
            except httpx.TimeoutException as error:
                raise EpisodeError(
                    "timed_out", f"waited {self._timeouts[what]:g} s for {what} at {self._url}"
                ) from error
            except httpx.HTTPError as error:
                problem = EpisodeError("server_unreachable", f"{self._url} cannot be reached ({error!r})")
            else:
                if reply.status_code == 200:
                    return self._read(reply)
                problem = self._refusal(reply)
                if reply.status_code < 500:
                    raise problem
            if time.monotonic() + pause_s >= deadline:
                raise problem
            time.sleep(random.uniform(0, pause_s))
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    def _refusal(self, reply: httpx.Response) -> EpisodeError:
        kind = "session_lost" if reply.status_code == 404 else "server_refused"
        return EpisodeError(kind, f"{self._url} answered {reply.status_code}: {reply.text[:QUOTED_CHARS]}")

    def _read(self, reply: httpx.Response) -> Json:
        try:
            content = reply.json()
        except ValueError as error:
            raise EpisodeError("server_refused", f"{self._url} answered no JSON ({error})") from error
        if not isinstance(content, dict):
            raise EpisodeError("server_refused", f"{self._url} answered {type(content).__name__}, not an object")
        if "failure" in content:
            raise EpisodeError(str(content["failure"]["kind"]), f"at {self._url}: {content['failure']['detail']}")
        return content


def _headers(token_env: str) -> dict[str, str]:
    """Raises: EpisodeError: the environment variable of the token is not set."""
    if not token_env:
        return {}
    token = os.environ.get(token_env, "")
    if not token:
        raise EpisodeError("no_token", f"environment.token_env={token_env} is not set in the environment: set it")
    return {"Authorization": f"Bearer {token}"}
