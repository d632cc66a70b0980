"""A policy outside a run: chat completions with exact tokens, and trajectories of sessions."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from mobula.actors.environments.base import encoded
from mobula.actors.environments.programs.processes import VerifiersProcess
from mobula.cluster.errors import PreflightError
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.serve.policy import ChatBody, ChatMessage, Conversations, LocalPolicy, make_app, settings_of
from mobula.deploy.training_service.captured import captured_rows
from mobula.deploy.training_service.messages import ChatImages, ImageChunk, InputBuilder, count_tokens, read_call
from mobula.deploy.training_service.tenants import ServiceLimits
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import TINY

IMAGE = base64.b64encode(encoded(np.full((2, 2, 3), 90, dtype=np.uint8), scale=28)).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY["qwen2.5-vl"](tmp_path_factory.mktemp("policy") / "model")


def config_of(model: Path, *words: str) -> RunConfig:
    given = ["policy=tiny_qwen2_5_vl", "sampler=huggingface", "sampler.max_tokens=8", "resources=laptop"]
    own = (f"policy.model={model}", "data=digits", "data.max_prompt_tokens=300")
    return load_config([*given, *own, *words], is_complete=False)


Served = tuple[TestClient, Path, LocalPolicy]


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("capture")
    policy = LocalPolicy(config_of(model), keep_files=True)
    with TestClient(make_app(policy, Conversations(policy, folder, num_siblings=2))) as client:
        yield client, folder, policy


def ask(client: TestClient, messages: list[Any], session: str = "", **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 5, "temperature": 0.9, "seed": 3, **fields}
    reply = client.post("/v1/chat/completions", json=body, headers={"X-Mobula-Session": session} if session else {})
    assert reply.status_code == 200, reply.text
    return reply.json()


def user(text: str, *, image: bool = False) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}] if image else []
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def answer_of(reply: dict[str, Any]) -> dict[str, Any]:
    return reply["choices"][0]["message"]


def test_a_session_is_sampled_behind_its_own_tokens_and_becomes_a_trajectory(served: Served, model: Path) -> None:
    client, folder, policy = served
    first_seen = []
    for session in ("one", "two"):
        client.post("/v1/sessions", json={"session": session, "task": "sum"}).raise_for_status()
        seed = len(first_seen)
        messages = [user("Which digit?", image=True)]
        first = ask(client, messages, session, seed=seed)
        messages += [answer_of(first), user("And this?", image=True)]
        second = ask(client, messages, session, seed=seed)
        first_seen.append(first)
        begun = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        assert not first["is_continued"] and second["is_continued"]
        assert second["prompt_token_ids"][: len(begun)] == begun
        done = client.post(f"/v1/sessions/{session}/finish", json={"reward": 0.5 + seed}).json()
        assert done == {"trajectories": 1}
    [recorded] = TrajectoryLog(folder / "trajectories", timeout_s=5).read(1)
    group = recorded.group
    assert [reward.value for reward in recorded.rewards] == [0.5, 1.5]
    for number, trajectory in enumerate(group.trajectories):
        ids = trajectory.actions.token_ids.tolist()
        assert group.prompt.expanded_ids.tolist() + ids == [*group.prompt.expanded_ids.tolist(), *ids]
        seen = first_seen[number]["choices"][0]["token_ids"]
        assert ids[: len(seen)] == seen
        assert (
            trajectory.action_mask.sum()
            == trajectory.response.num_tokens
            == sum(turn.end - turn.start for turn in trajectory.response.turns)
        )
        assert len(trajectory.response.turns) == 2 and len(trajectory.actions.media_spans) == 1
        assert trajectory.response.turns[-1].rewards == {"reward": 0.5 + number}
    for trajectory, row in zip(group.trajectories, captured_rows(folder), strict=True):
        images = [chunk for chunk in row.model_input.chunks if isinstance(chunk, types.ImageChunk)]
        assert [image.data for image in images] == [base64.b64decode(IMAGE)] * 2
        inputs = InputBuilder(ChatImages(policy.chat, 2), num_embeddings=policy.chat.num_embeddings, max_tokens=1000)
        assert [inputs.count(ImageChunk(image.data)) for image in images] == [image.expected_tokens for image in images]
        request = types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(data=[row], loss_fn="ppo"), model_id="m", seq_id=1
        )
        body = forward_backward_request_to_proto(request).SerializeToString()
        [read] = read_call(body, inputs, ServiceLimits.of(policy.config)).rows
        assert count_tokens(body, inputs) == read.prompt.num_tokens
        tokens = np.concatenate([group.prompt.expanded_ids, trajectory.actions.token_ids])
        assert read.prompt.expanded_ids.tolist() == tokens[:-1].tolist()
        assert read.inputs["target_tokens"].tolist() == tokens[1:].tolist()
        assert [handle.key for handle in read.prompt.media] == [group.prompt.media[0].key] * 2


def test_log_probs_are_those_of_the_model(served: Served, model: Path) -> None:
    client, _, policy = served
    reply = ask(client, [{"role": "user", "content": "Say something."}], temperature=1.0)
    choice = reply["choices"][0]
    ids = torch.tensor([reply["prompt_token_ids"] + choice["token_ids"]])
    network = load_model(str(model), torch.float32, "sdpa").eval()
    with torch.no_grad():
        logits = network(input_ids=ids).logits[0, -len(choice["token_ids"]) - 1 : -1]
    logits[:, list(policy.chat.media_token_ids)] = -torch.inf
    expected = logits.log_softmax(-1).gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
    found = [part["logprob"] for part in choice["logprobs"]["content"]]
    assert found == pytest.approx(expected.tolist(), abs=1e-5)
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_a_changed_history_is_a_conversation_of_its_own(served: Served) -> None:
    client, _, _ = served
    client.post("/v1/sessions", json={"session": "changed", "task": "other"}).raise_for_status()
    first = ask(client, [user("One?")], "changed")
    edited = [user("One?"), {"role": "assistant", "content": answer_of(first)["content"] + " edited"}, user("Two?")]
    assert not ask(client, edited, "changed")["is_continued"]
    forks = [ask(client, [user("One?"), answer_of(first), user(text)], "changed") for text in ("Two?", "Three?")]
    assert all(fork["is_continued"] for fork in forks)
    assert client.post("/v1/sessions/changed/finish", json={"reward": 1.0}).json() == {"trajectories": 3}


def test_a_cut_call_of_a_session_keeps_the_tokens_it_was_sampled_among(served: Served, model: Path) -> None:
    client, folder, policy = served
    for session in ("cut-a", "cut-b"):
        client.post("/v1/sessions", json={"session": session, "task": "cut"}).raise_for_status()
        messages = [user("Which digit?")]
        first = ask(client, messages, session, top_p=0.7, top_k=4, temperature=1.0)
        messages += [answer_of(first), user("And this?")]
        second = ask(client, messages, session, temperature=1.0)
        assert second["is_continued"]
        client.post(f"/v1/sessions/{session}/finish", json={"reward": 1.0}).raise_for_status()
    log = TrajectoryLog(folder / "trajectories", timeout_s=5)
    [recorded] = [g for step in log.steps() for g in log.read(step) if g.group.prompt.prompt_id.startswith("cut/")]
    for trajectory in recorded.group.trajectories:
        kept, first_turn = trajectory.actions.kept, trajectory.response.turns[0]
        cut = kept.counts[first_turn.start : first_turn.end]
        assert cut.min() >= 1 and cut.max() <= 4
        assert not kept.counts[first_turn.end :].any(), "the second call was cut by nothing"
        sets = np.split(kept.ids, kept.counts.cumsum()[:-1])
        assert all(own in among for own, among in zip(trajectory.actions.token_ids[: len(cut)], sets, strict=False))


def test_a_cut_that_vllm_cannot_report_is_refused_in_a_session_alone(model: Path) -> None:
    words = ["policy=tiny_qwen2_5_vl", "sampler=vllm", "resources=laptop", f"policy.model={model}", "data=digits"]
    config = load_config(words, is_complete=False)
    body = ChatBody(messages=[ChatMessage(role="user", content="x")], top_p=0.9)
    with pytest.raises(ValueError, match="send top_k as well"):
        settings_of(config, body, is_kept=True)
    assert not settings_of(config, body, is_kept=False).keeps_sets
    assert settings_of(config, body.model_copy(update={"top_k": 8}), is_kept=True).keeps_sets


def test_a_streamed_call_has_the_same_answer(served: Served) -> None:
    client, _, _ = served
    whole = ask(client, [user("Which digit?")])
    body = {"messages": [user("Which digit?")], "max_tokens": 5, "temperature": 0.9, "seed": 3, "stream": True}
    reply = client.post("/v1/chat/completions", json=body)
    *chunks, end = [part.removeprefix("data: ") for part in reply.text.split("\n\n") if part]
    first, last, usage = map(json.loads, chunks)
    assert end == "[DONE]" and first["choices"][0]["delta"] == whole["choices"][0]["message"]
    assert first["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert usage["usage"] == whole["usage"] and first["prompt_token_ids"] == whole["prompt_token_ids"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"messages": []}, 422, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 422, "role"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 422, "tools"),
        ({"messages": [{"role": "user", "content": "word " * 400}]}, 400, "data.max_prompt_tokens"),
        ({"messages": [user("x") | {"content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]}, 400,
         "nothing is fetched"),
        ({"messages": [{"role": "user", "content": "x"}], "user": "not-open"}, 404, "POST /v1/sessions"),
    ],
)  # fmt: skip
def test_unfit_requests_are_refused_in_openais_form(served: Served, body: Any, status: int, message: str) -> None:
    reply = served[0].post("/v1/chat/completions", json=body)
    assert reply.status_code == status and message in reply.json()["error"]["message"]


def test_a_session_is_opened_once_and_finished_once(served: Served) -> None:
    client, _, _ = served
    assert client.post("/v1/sessions", json={"session": "s"}).status_code == 200
    assert client.post("/v1/sessions", json={"session": "s"}).status_code == 409
    assert client.post("/v1/sessions/s/finish", json={"reward": "NaN"}).status_code == 422
    assert client.post("/v1/sessions/s/finish", json={}).json() == {"trajectories": 0}
    assert client.post("/v1/sessions/s/finish", json={}).status_code == 404


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="no checkpoint folder"):
        LocalPolicy(config_of(tmp_path / "nothing"))


def test_a_python_without_verifiers_is_refused() -> None:
    with pytest.raises(ValueError, match="make it with `deploy/environment.sh verifiers`"):
        VerifiersProcess("/none", {}, import_path=(), max_tasks=1)
