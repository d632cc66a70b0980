"""Authentication of this process at a Ray cluster: none, or the token that all nodes share."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

from mobula.cluster.errors import PreflightError

AuthMode = Literal["disabled", "token"]
MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
DEFAULT_PATH = Path(".ray", "auth_token")  # below the home folder; Ray reads it where neither variable is set
KUBERNETES = "RAY_ENABLE_K8S_TOKEN_AUTH"  # Ray then takes the pod's service account for a client without a token
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
KNOCK_TIMEOUT_S = 5.0


def set_auth(mode: AuthMode) -> None:
    """Sets the authentication mode of this process and its children. Call it before Ray is imported."""
    if mode == "token":
        _token_source()
    os.environ[MODE] = mode


def check_auth() -> None:
    """Checks RAY_AUTH_MODE, and that the token that it may ask for is there."""
    mode = os.environ.get(MODE, "disabled")
    if mode.lower() not in ("disabled", "token"):
        raise PreflightError(f"RAY_AUTH_MODE={mode} is unknown: set it to disabled or token")
    if _is_token():
        _token_source()


def check_admission(address: str, source: str = "--address") -> None:
    """Checks that the cluster at `address`, HOST:PORT or `auto`, admits this process.

    `ray.init` retries for 20 s, and for minutes if no process listens. A control store too busy to answer passes; then
    `ray.init` decides. `source` is the key, variable or option with the address.
    """
    check_auth()
    import mobula.deploy.host.ray_defaults  # noqa: F401  isort: skip  (sets what ray reads when imported)
    from ray._private import services
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs
    from ray.exceptions import AuthenticationError, RpcError

    try:
        store = services.canonicalize_bootstrap_address_or_die(address)
        host, _, port = store.rpartition(":")
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()
        GcsClient(address=store)
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"no Ray cluster answers at {address} ({error}), which {source} names: give HOST:PORT of a running "
            f"cluster's control store, or leave {source} out"
        ) from error
    except AuthenticationError as error:
        explain_refusal(f"the Ray cluster at {address}", error)
    except RpcError:
        return


@contextmanager
def connected(address: str, namespace: str | None = None) -> Iterator[Any]:
    """Connects this process to the cluster at `address` while the body runs, which gets the module `ray`."""
    check_admission(address)
    import ray

    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield ray
    finally:
        ray.shutdown()


def explain_refusal(cluster: str, error: Exception) -> NoReturn:
    """Raises what to set, since `cluster` refuses this process with `error`."""
    if _is_token():
        raise PreflightError(
            f"{cluster} refuses the token of {_token_source()}: use the token that it was started with"
        ) from error
    raise PreflightError(
        f"{cluster} asks for a token, and RAY_AUTH_MODE is disabled: set RAY_AUTH_MODE=token (or --auth token), and "
        "RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that holds it"
    ) from error


def _is_token() -> bool:
    return os.environ.get(MODE, "disabled").lower() == "token"


def _token_source() -> str:
    if os.environ.get(TOKEN):
        return TOKEN
    named = os.environ.get(TOKEN_PATH)
    if not named and os.environ.get(KUBERNETES) and SERVICE_ACCOUNT.is_file():
        return str(SERVICE_ACCOUNT)
    path = Path(named) if named else Path.home() / DEFAULT_PATH
    source = f"{TOKEN_PATH}={named}" if named else f"~/{DEFAULT_PATH}"
    try:
        problem = "" if path.read_text(encoding="utf-8").strip() else "is empty"
    except (OSError, ValueError) as error:
        problem = f"has none ({error})"
    if problem:
        raise PreflightError(
            f"token authentication needs a token, and {source} {problem}: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH "
            "to a file that holds it"
        )
    return source
