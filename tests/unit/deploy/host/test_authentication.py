"""A client says how it identifies itself before it joins a cluster, and what a cluster refuses is explained at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import mobula.deploy.host.ray_defaults  # noqa: F401  isort: skip  (sets what ray reads when imported)
from ray.exceptions import AuthenticationError, RpcError

from mobula.cluster.errors import PreflightError
from mobula.configs.load import load_config
from mobula.deploy.host import session
from mobula.deploy.host.authentication import check_admission, check_auth, set_auth

SECRET = "of-this-cluster"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without a token, and an environment without one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def address() -> Iterator[str]:
    """Where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def answer(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[str]:
    """What Ray's client of a control store raises; the addresses that it was given."""
    asked: list[str] = []

    def client(address: str) -> None:
        asked.append(address)
        if error is not None:
            raise error

    monkeypatch.setattr("ray._raylet.GcsClient", client)
    return asked


def test_a_token_comes_from_the_variable_its_file_or_the_file_that_ray_reads(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PreflightError, match=r"needs a token, and ~/.ray/auth_token has none .*set RAY_AUTH_TOKEN, or"):
        set_auth("token")
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(SECRET)
    set_auth("token")
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "nothing"))
    with pytest.raises(PreflightError, match=f"RAY_AUTH_TOKEN_PATH={home / 'nothing'} has none"):
        check_auth()
    (home / "nothing").write_text("\n")
    with pytest.raises(PreflightError, match=f"RAY_AUTH_TOKEN_PATH={home / 'nothing'} is empty"):
        check_auth()
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)
    check_auth()


def test_an_unknown_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "kerberos")
    with pytest.raises(PreflightError, match="RAY_AUTH_MODE=kerberos .* disabled or token"):
        check_auth()


def test_a_refused_client_learns_what_to_set_and_the_token_is_not_repeated(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(monkeypatch, AuthenticationError("InvalidAuthToken"))
    with pytest.raises(PreflightError, match=f"cluster at {address} asks for a token, and .*set RAY_AUTH_MODE=token"):
        check_admission(address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)
    set_auth("token")
    with pytest.raises(PreflightError, match=f"{address} refuses the token of RAY_AUTH_TOKEN: use") as raised:
        check_admission(address)
    assert SECRET not in str(raised.value) and asked == [address, address]


@pytest.mark.parametrize("error", [None, RpcError("busy")])
def test_a_cluster_that_admits_or_is_busy_is_left_to_ray(
    error: Exception | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, error)
    check_admission(address)


@pytest.mark.parametrize("nowhere", ["127.0.0.1:1", "nowhere"])
def test_where_nothing_listens_no_cluster_answers(nowhere: str) -> None:
    with pytest.raises(PreflightError, match=f"no Ray cluster answers at {nowhere} "):
        check_admission(nowhere)


def test_a_run_names_a_cluster_that_does_not_admit_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, AuthenticationError("InvalidAuthToken"))
    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)  # other tests of this process connect to Ray
    with pytest.raises(PreflightError, match=f"cluster at {address} asks for a token"):
        with session.ray_session(load_config(["experiment=digits", f"resources.address={address}"])):
            pass


def test_a_private_cluster_with_a_token_needs_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(PreflightError, match="token authentication needs a token"):
        session.start_private(load_config(["experiment=digits"]), include_dashboard=False)
