"""The options of `mobula serve-rewards`: where its token is, and where to listen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mobula.cluster.errors import PreflightError
from mobula.configs.load import ConfigError
from mobula.deploy.tools.http_server import Address, is_loopback, read_token
from mobula.deploy.tools.serve_rewards import ServeRewardsOptions, serve

REWARDS = """
components:
  - {name: a, function: format, weight: 1.0, options: {preset: boxed}, service: reward, needs_images: false,
     retries: 0, cache_entries: 0}
accuracy_component: a
"""


def test_a_token_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    monkeypatch.setenv("A_TOKEN", "from-env")
    assert read_token("A_TOKEN", None) == "from-env"
    assert read_token(None, file) == "from-file"
    assert read_token(None, None) is None


def test_a_token_that_is_not_there_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_TOKEN", raising=False)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for env, file, message in (
        ("A_TOKEN", None, "A_TOKEN holds no token"),
        (None, empty, "holds no token"),
        (None, tmp_path / "missing", "cannot be read"),
        ("A_TOKEN", empty, "give one of them"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_token(env, file)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rewards.yaml"
    file.write_text(REWARDS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ServeRewardsOptions(Address("127.0.0.1", port, None), 1, 1, 1.0, 1000, "cpu", "float32")
        with pytest.raises(PreflightError, match=f"127.0.0.1:{port} cannot be listened on"):
            serve(file, options, lambda url: None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "a.host.name"])
def test_other_machines_need_a_token(host: str, tmp_path: Path) -> None:
    options = ServeRewardsOptions(Address(host, 0, None), 1, 1, 1.0, 1000, "cpu", "float32")
    with pytest.raises(PreflightError, match="there is no token: give --token-env or --token-file"):
        serve(tmp_path / "rewards.yaml", options, lambda url: None)
    assert all(is_loopback(own) for own in ("127.0.0.1", "::1", "localhost"))
