"""The Ray cluster of a run, joined or private, and the authentication at it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import NodeResources
from mobula.configs.load import load_config
from mobula.deploy.host import session
from mobula.deploy.host.session import expected_nodes, ray_session, run_record, start_private

import mobula.deploy.host.ray_defaults  # noqa: F401  isort: skip  (sets what ray reads when imported)
from ray.exceptions import AuthenticationError, RpcError

from mobula.deploy.host.authentication import check_admission, check_auth, set_auth

NODE = NodeResources("node", num_cpus=2, num_gpus=0)


class FakeContext:
    """What Ray returns to a connected process about its cluster."""

    gcs_address = "127.0.0.1:6379"
    namespace = "mine"
    session_name = "session_of_another_1"

    def get_temp_dir(self) -> str:
        return "/tmp/ray"

    def get_session_name(self) -> str:
        return self.session_name


class FakeRay:
    """Stands where `ray` does."""

    refusal: Exception | None = None

    def __init__(self, *, is_initialized: bool = False, address: str = "127.0.0.1") -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._is_initialized = is_initialized
        self._address = address

    def is_initialized(self) -> bool:
        return self._is_initialized

    def init(self, **options: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.events.append(("init", options))
        self.run_at_init = os.environ.get("MOBULA_RUN")

    def get_runtime_context(self) -> FakeContext:
        return FakeContext()

    def shutdown(self) -> None:
        self.events.append(("shutdown", {}))

    def nodes(self) -> list[dict[str, str]]:
        return [{"NodeManagerAddress": self._address}]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without a token, and an environment without one and without the address of a cluster."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(session, "cluster_nodes", lambda: (NODE,))
    return tmp_path


def with_ray(monkeypatch: pytest.MonkeyPatch, **state: Any) -> FakeRay:
    fake = FakeRay(**state)
    monkeypatch.setattr(session, "ray", fake)
    return fake


def test_without_a_cluster_a_private_one_is_started_on_the_loopback_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = with_ray(monkeypatch)
    config = load_config(["experiment=digits", "resources.num_cpus=1", "resources.object_store_bytes=123456789"])
    with ray_session(config) as found:
        assert (found.nodes, found.is_local) == ((NODE,), True)
        assert [name for name, _ in ray.events] == ["init"]
    [(_, options), (last, _)] = ray.events
    assert last == "shutdown"
    assert (options["address"], options["_node_ip_address"]) == ("local", "127.0.0.1")
    assert (options["num_cpus"], options["object_store_memory"]) == (1, 123456789)
    assert options["dashboard_host"] == "127.0.0.1"
    assert options["namespace"] == config.name


def test_the_private_cluster_ends_when_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = with_ray(monkeypatch)
    with pytest.raises(KeyError), ray_session(load_config(["experiment=digits"])):
        raise KeyError("the run failed")
    assert [name for name, _ in ray.events] == ["init", "shutdown"]


def test_a_submitted_run_joins_its_cluster_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = with_ray(monkeypatch, address="10.0.0.1")
    admitted_by: list[str] = []
    monkeypatch.setattr(session, "check_admission", lambda address, source: admitted_by.append(address))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with ray_session(load_config(["experiment=digits", "name=mine"])) as found:
        assert not found.is_local
    assert admitted_by == ["10.0.0.1:6379"]
    [(_, options), _] = ray.events
    assert options["namespace"] == "mine"
    assert "num_cpus" not in options
    assert "address" not in options, "ray reads RAY_ADDRESS itself"


def test_a_cluster_that_is_connected_already_is_used_and_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = with_ray(monkeypatch, is_initialized=True)
    with ray_session(load_config(["experiment=digits"])) as found:
        assert found.nodes == (NODE,)
    assert ray.events == []


def test_only_the_cluster_that_would_be_started_here_can_be_planned_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch)
    [node] = expected_nodes(load_config(["experiment=digits", "resources.num_cpus=1"]))
    assert node.num_cpus == 1
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert expected_nodes(load_config(["experiment=digits"])) is None
    monkeypatch.delenv("RAY_ADDRESS")
    with_ray(monkeypatch, is_initialized=True)
    assert expected_nodes(load_config(["experiment=digits"])) is None


def test_everything_that_ray_starts_carries_the_mark_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = with_ray(monkeypatch)
    with ray_session(load_config(["experiment=digits", "name=mine"])) as found:
        assert ray.run_at_init == found.mark.run_id and found.mark.run_id.startswith("mine/")
    assert "MOBULA_RUN" not in os.environ


def test_the_record_holds_where_the_cluster_is_and_whose_session_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch)
    config = load_config(["experiment=digits", "name=mine", "folder=some/runs"])
    with ray_session(config) as found:
        joined = run_record(config, found)
        monkeypatch.setattr(FakeContext, "session_name", f"session_of_us_{os.getpid()}")
        private = run_record(config, found)
    assert (joined.run, joined.address, joined.namespace) == ("mine", "127.0.0.1:6379", "mine")
    assert joined.run_folder == Path.cwd() / "some/runs/mine" and joined.mark == found.mark
    assert joined.session_folder is None, "a cluster that others started is not ours to clean up"
    assert private.session_folder == Path(f"/tmp/ray/session_of_us_{os.getpid()}")


def test_a_machine_that_is_too_slow_for_ray_is_named_and_other_errors_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = with_ray(monkeypatch)
    for error, kind, message in (
        ("The current node timed out during startup. This could happen ...", PreflightError, "Start again once fewer"),
        ("no space left", Exception, "^no space left$"),
    ):
        ray.refusal = Exception(error)
        with pytest.raises(kind, match=message):
            start_private(load_config(["experiment=digits"]), include_dashboard=False)


SECRET = "of-this-cluster"


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


def test_a_token_comes_from_a_variable_its_file_or_that_of_ray(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_refused_client_learns_what_to_set_but_no_token(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, AuthenticationError("InvalidAuthToken"))
    with pytest.raises(PreflightError, match=f"cluster at {address} asks for a token, and .*set RAY_AUTH_MODE=token"):
        check_admission(address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)
    set_auth("token")
    with pytest.raises(PreflightError, match=f"{address} refuses the token of RAY_AUTH_TOKEN: use") as raised:
        check_admission(address)
    assert SECRET not in str(raised.value) and asked == [address, address]


@pytest.mark.parametrize("error", [None, RpcError("busy")])
def test_other_clusters_are_left_to_ray(error: Exception | None, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, error)
    check_admission(address)


@pytest.mark.parametrize("nowhere", ["127.0.0.1:1", "nowhere"])
def test_where_nothing_listens_no_cluster_answers(nowhere: str) -> None:
    with pytest.raises(PreflightError, match=f"no Ray cluster answers at {nowhere} "):
        check_admission(nowhere)


def test_a_run_names_a_cluster_that_does_not_admit_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, AuthenticationError("InvalidAuthToken"))
    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)  # other tests of this process connect to Ray
    config = load_config(["experiment=digits", f"resources.address={address}"])
    with pytest.raises(PreflightError, match=f"cluster at {address} asks for a token"), ray_session(config):
        pass


def test_a_private_cluster_with_a_token_needs_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(PreflightError, match="token authentication needs a token"):
        start_private(load_config(["experiment=digits"]), include_dashboard=False)
