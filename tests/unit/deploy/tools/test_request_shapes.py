"""Every route of every server: a body of a wrong shape is refused with 4xx, and never answered with 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from episode_data import episode_config
from fastapi.testclient import TestClient
from http_servers import reward_app
from training_roles import TinyEngines, TinyLearner
from training_server import LIMITS, NAME, make_service

from mobula.actors.environments.adapters.agent_endpoint import AgentEndpoint
from mobula.actors.environments.server import EnvironmentServer
from mobula.actors.environments.server import make_app as environment_app
from mobula.cluster.serving import Address, RequestGate
from mobula.deploy.serve.policy import make_app as policy_app
from mobula.deploy.training_service.app import make_app as training_app
from mobula.deploy.training_service.tenants import MEDIA_TYPES, Tenants, tenant_gate
from mobula.rewards.contract import Score

WRONG: list[Any] = [None, [], {}, [[]], "", "x", "\ud800", "²", True, -1, 1.5, 10**30, float("inf"), [{}], {"a": [1]}]
TEXTS = [b"", b"{", b"\xff", b"[" * 20_000, b'{"a":' * 20_000, b"1" * 5000, b'{"\\ud800": "\\ud800"}']
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}

IN_SESSION, IN_SAMPLER = {"session_id": "SESSION"}, {"sampling_session_id": "SESSION:sample:0"}
LORA, NOTE, TARGET = {"rank": 4, "seed": 1}, {"a": "b"}, {**IN_SAMPLER, "cloned_sampler_id": 0}
SAMPLED = "sample-SESSION:sample:0:3"
SAMPLING = {"max_tokens": 2, "temperature": 1.0, "seed": 3, "stop": ["a"], "top_k": 2, "top_p": 0.5}
CALL = {"name": "a", "arguments": {}, "status": "ok", "detail": ""}
VALID: dict[str, dict[str, Any]] = {
    "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0", "type": "create_session"},
    "session_heartbeat": {"session_id": "SESSION"},
    "create_model": {**IN_SESSION, "model_seq_id": 1, "base_model": NAME, "lora_config": LORA, "user_metadata": NOTE},
    "get_info": {"model_id": "SESSION:train:0"},
    "optim_step": {"model_id": "SESSION:train:0", "seq_id": 7, "adam_params": ADAM},
    "load_weights": {"model_id": "SESSION:train:0", "path": "tinker://x/weights/a", "optimizer": True, "seq_id": 8},
    "save_weights": {"model_id": "SESSION:train:0", "path": "a", "seq_id": 9, "ttl_seconds": 4000},
    "save_weights_for_sampler": {"model_id": "SESSION:train:0", "seq_id": 10, "sampling_session_seq_id": 1},
    "save_weights_external": {"model_id": "SESSION:train:0", "path": "a", "seq_id": 11},
    "unload_model": {"model_id": "SESSION:train:0"},
    "create_sampling_session": {"session_id": "SESSION", "sampling_session_seq_id": 1, "base_model": NAME},
    "join_sampling_session": {"sampling_session_id": "SESSION:sample:1"},
    "asample": {**IN_SAMPLER, "seq_id": 3, "num_samples": 1, "prompt": PROMPT, "sampling_params": SAMPLING},
    "cancel_future": {"request_id": SAMPLED},
    "retrieve_future": {"request_id": "SESSION:train:0:99"},
    "retrieve_futures": {"target": TARGET, "prev_cursor": 0, "timeout": 0.01, "retrieved_request_ids": [SAMPLED]},
    "weights_info": {"tinker_path": "tinker://x/weights/a"},
    "copy_weights": {"source_path": "tinker://x/weights/a", "session_id": "SESSION", "ttl_seconds": 4000},
    "ttl": {"ttl_seconds": 4000},
    "reset": {"call": 0, "seed": 3, "options": {}},
    "step": {"call": 1, "action": {"text": "a", "is_truncated": False, "tool_calls": [CALL]}},
    "demonstrate": {"call": 2},
    "completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "model": "m", "n": 1},
    "sessions": {"session": "a", "task": "b"},
    "finish": {"reward": 1.0, "components": {"a": 1.0}},
    "score": {"samples": [{"response": "abc", "num_tokens": 1, "references": ["a"], "images": []}]},
    "lightrft": {"queries": ["a"], "prompts": [""], "images": [None], "references": ["a"]},
}


def changed(value: Any) -> Iterator[Any]:
    """The value with each of its parts replaced by each wrong one."""
    yield from WRONG
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        for wrong in changed(part):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = wrong
            yield copy
        if isinstance(value, dict):
            yield {k: v for k, v in value.items() if k != key}


def bodies(path: str) -> Iterator[bytes]:
    yield from TEXTS
    name = path.rpartition("/")[2]
    yield from (json.dumps(body).encode() for body in changed(VALID.get(name, {})))


def routes(app: Any) -> list[tuple[str, str]]:
    return [(m, r.path) for r in app.routes for m in getattr(r, "methods", ()) or () if m in ("POST", "PUT", "DELETE")]


def faults(client: TestClient, app: Any, names: dict[str, str]) -> list[str]:
    """The requests that were answered with 500."""
    found = []
    for method, path in routes(app):
        url = path
        for name, value in names.items():
            url = url.replace(f"{{{name}}}", value)
        for body in bodies(url):
            content = body.replace(b"SESSION", names.get("session_id", "s").encode())
            kind = MEDIA_TYPES.get(url, "application/json")
            status = client.request(method, url, content=content, headers={"Content-Type": kind}).status_code
            if status == 500:
                found.append(f"{method} {url} {content[:300]!r}")
    return found


def client_of(gate: RequestGate) -> TestClient:
    return TestClient(gate, base_url="http://127.0.0.1", raise_server_exceptions=False)


def test_rewards() -> None:
    gate = reward_app(lambda request: Score(1.0))
    with client_of(gate) as client:
        assert faults(client, gate.app, {}) == []


def test_environments() -> None:
    config = episode_config(Path("model"), "environment.options={fault: ''}", "environment.host=inline").environment
    app = environment_app(EnvironmentServer(config, idle_s=60))
    gate = RequestGate(app, Address("127.0.0.1", 0, None), 1 << 20, 60.0)
    with client_of(gate) as client:
        for method in ("reset", "step", "demonstrate", "none"):
            session = client.post("/v1/sessions", json={}).json()["session"]
            assert faults(client, app, {"name": session, "method": method}) == []
        good = client.post("/v1/sessions", json={}).json()["session"]
        reply = client.post(f"/v1/sessions/{good}/step", json={"call": 0})
        assert reply.status_code == 422 and "action" in reply.json()["detail"]


def test_training(tmp_path: Path) -> None:
    app = training_app(make_service(tmp_path, TinyLearner(), TinyEngines(), poll_s=0.01, learner_s=0.2))
    with client_of(tenant_gate(app, Tenants({}), LIMITS.max_request_bytes)) as client:
        session = client.post("/api/v1/create_session", json=VALID["create_session"]).json()["session_id"]

        def sent(name: str, **values: Any) -> None:
            text = json.dumps({**VALID[name], **values}).replace("SESSION", session)
            headers = {"Content-Type": "application/json"}
            assert client.post(f"/api/v1/{name}", content=text, headers=headers).status_code == 200

        sent("create_model", model_seq_id=0)
        sent("create_sampling_session", sampling_session_seq_id=0)
        names = {"session_id": session, "model_id": f"{session}:train:0", "kind": "weights", "name": "a"}
        assert faults(client, app, names) == []
        assert client.post("/api/v1/cancel_future", json=[]).status_code == 422
        for query in ("limit=x", "limit=-1", "offset=99999999999999999999999999"):
            assert client.get(f"/api/v1/sessions?{query}").status_code < 500


class NoPolicy:
    """The parts of a policy and of its conversations that are reached before an answer is sampled."""

    config: Any

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class NoConversations:
    num_sessions = 0

    def open(self, session: str, task: str) -> None: ...

    def finish(self, session: str, reward: Any) -> int:
        return 0

    async def complete(self, *asked: Any) -> Any:
        raise ValueError("nothing is sampled here")

    def close(self) -> None: ...


def test_policies() -> None:
    from mobula.configs.load import load_config

    policy = NoPolicy()
    policy.config = load_config(["experiment=digits", "sampler=huggingface"])
    app = policy_app(policy, NoConversations())  # type: ignore[arg-type]  # only what these requests reach
    with client_of(RequestGate(app, Address("127.0.0.1", 0, None), 1 << 20, 60.0)) as client:
        assert faults(client, app, {"session": "s"}) == []


@pytest.mark.timeout(120)
def test_the_agent_endpoint() -> None:
    endpoint = AgentEndpoint()
    talk = endpoint.open()
    headers = {"Content-Type": "application/json"}
    talk.close()  # calls that fit are answered at once with 410
    with httpx.Client(trust_env=False, headers=headers) as client:
        statuses = {client.post(f"{talk.url}/chat/completions", content=b).status_code for b in bodies("/completions")}
    endpoint.close()
    assert statuses == {400, 410}
