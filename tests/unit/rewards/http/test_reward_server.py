"""The reward service: what it answers, what it refuses, and what it does when it is busy, late or asked to stop."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from http_servers import Running, Scorer, reward_app, serving
from waiting import wait_until

from mobula.cluster.serving import Address
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure
from mobula.rewards.http.server import BusyError, RewardServer, ScorerThreads, make_app
from mobula.rewards.http.wire import LightrftBody
from mobula.rewards.images import without_markers

SAMPLE = {"response": "abc", "num_tokens": 1}


def fetch(url: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """(status, parsed body, headers) of a GET, or of a POST if there is a body."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            status, content, found = response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        status, content, found = error.code, error.read(), error.headers
    is_json = found.get_content_type() == "application/json"
    names = {name.lower(): value for name, value in found.items()}
    return status, json.loads(content) if is_json else content.decode(), names


def health(server: Running) -> dict[str, Any]:
    return fetch(f"{server.url}/health")[1]


def look(request: RewardRequest) -> Outcome:
    """Scores by length; texts may ask for trouble."""
    match request.response.text:
        case "unfit":
            return ScoringFailure(FailureKind.FAILED, "no reference")
        case "late":
            return ScoringFailure(FailureKind.TIMED_OUT, "too late")
        case text:
            return Score(float(len(text)))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(reward_app(look, max_request_bytes=4000)) as running:
        yield running


def test_lightrft_is_answered_with_the_score_of_responses_alone(server: Running) -> None:
    body = {
        "queries": [
            "<|pad|><|im_start|>user\n<|image_pad|><|image_pad|>How many?<|im_end|>\n"
            "<|im_start|>assistant\n12<|im_end|>",
            "<pad><pad><s>Question</s>four</s><pad>",
        ],
        "prompts": ["<|im_start|>user\n<|image_pad|>How many?<|im_end|>\n<|im_start|>assistant\n", "<s>Question</s>"],
        "labels": ["ours to ignore"],
    }
    for route in ("score", "lightrft"):
        assert fetch(f"{server.url}/{route}", body)[:2] == (200, {"rewards": [2.0, 4.0]})
    responses = {"queries": ["12", "four<|im_end|>"], "prompts": body["prompts"]}
    assert fetch(f"{server.url}/lightrft?queries=response", responses)[:2] == (200, {"rewards": [2.0, 4.0]})


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"queries": ["p:ok", "p:unfit"]}, 422, "sample 1 failed: no reference"),
        ({"queries": ["p:late", "p:ok"]}, 504, "sample 0 timed_out"),
        ({"queries": ["ok", "p:ok"]}, 422, "sample 0: its query does not begin with its prompt"),
        ({"prompts": None}, 422, "does not begin with its prompt"),
        ({"prompts": ["p:"]}, 422, "prompts has 1 rows for 2 queries"),
        ({"images": [["####"], None]}, 422, "sample 0: an image is no base64"),
    ],
)
def test_lightrft_gets_an_error_where_it_cannot_get_a_number(
    server: Running, change: dict[str, Any], status: int, message: str
) -> None:
    body = {"queries": ["p:ok", "p:ok"], "prompts": ["p:", "p:"], **change}
    got, reply, _ = fetch(f"{server.url}/lightrft", body)
    assert got == status and message in reply["detail"]


def test_lightrft_images_and_references_come_in_every_form() -> None:
    body = LightrftBody(
        queries=["p1", "p2", "p3"],
        prompts=["p", "p", "p"],
        references=["a string", ["a", "b"], None],
        images=["YWJj", ["YQ==", "data:image/jpeg;base64,Yg=="], None],
    )
    found = body.requests("full")
    assert [request.references for request in found] == [("a string",), ("a", "b"), ()]
    assert [request.prompt_images for request in found] == [(b"abc",), (b"a", b"b"), ()]


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("<|im_start|>a <|im_end|>", "a "),
        ("<pad><pad>a</s><pad>", "a"),
        ("a <s>struck out</s> b", "a <s>struck out</s> b"),
        ("1 <|> 2 | x |> y", "1 <|> 2 | x |> y"),
        ("<start_of_turn>model\nyes<end_of_turn>", "model\nyes"),
    ],
)
def test_special_tokens_go_and_nothing_else(text: str, cleaned: str) -> None:
    assert without_markers(text) == cleaned


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"samples": [{**SAMPLE, "response": 1}]}, ["body", "mobula", "samples", 0, "response"]),
        ({"samples": [SAMPLE, {"response": "x"}]}, ["body", "mobula", "samples", 1, "num_tokens"]),
        ({"samples": [{**SAMPLE, "images": ["###"]}]}, ["body", "mobula", "samples", 0, "images", 0]),
        ({"samples": [{**SAMPLE, "referenes": []}]}, ["body", "mobula", "samples", 0, "referenes"]),
        ({"samples": []}, ["body", "mobula", "samples"]),
        ({"queries": "abc"}, ["body", "lightrft", "queries"]),
        (b"{", ["body", 1]),
    ],
)
def test_a_body_that_does_not_fit_is_refused_by_field(server: Running, body: Any, field: list[Any]) -> None:
    status, reply, _ = fetch(f"{server.url}/score", body)
    assert status == 422
    assert field in [detail["loc"] for detail in reply["detail"]]
    assert all(set(detail) == {"loc", "msg", "type"} for detail in reply["detail"]), "nothing is sent back"


def test_a_large_body_is_refused_unread(server: Running) -> None:
    status, reply, _ = fetch(f"{server.url}/score", b"x" * 200_000)
    assert status == 413 and "4000 are allowed" in reply["detail"]
    chunks = (b"x" * 1000 for _ in range(5))  # no length is announced
    headers = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/score", chunks, headers)
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(request, timeout=3)


def test_only_the_token_opens() -> None:
    with serving(reward_app(look, token="s3cret")) as running:
        for path, body in (("/score", {"samples": [SAMPLE]}), ("/lightrft", {"queries": ["x"]}), ("/metrics", None)):
            for headers in ({}, {"Authorization": "Bearer s3cres"}, {"Authorization": "s3cret"}):
                status, _, found = fetch(running.url + path, body, **headers)
                assert (status, found["www-authenticate"]) == (401, "Bearer")
        opened = fetch(f"{running.url}/score", {"samples": [SAMPLE]}, Authorization="Bearer s3cret")
        assert opened[0] == 200 and opened[1]["outcomes"][0]["value"] == 3.0
        assert fetch(f"{running.url}/health")[0] == 200


def test_what_happened_is_counted_and_described() -> None:
    with serving(reward_app(look, token="s3cret", max_request_bytes=4000)) as running:
        url, token = f"{running.url}/score", {"Authorization": "Bearer s3cret"}
        fetch(url, {"samples": [SAMPLE, {**SAMPLE, "response": "unfit"}, SAMPLE]}, **token)
        assert fetch(url, {"samples": [SAMPLE]})[0] == 401
        assert fetch(url, {"samples": []}, **token)[0] == 422
        assert fetch(url, b"x" * 5000, **token)[0] == 413
        lines = fetch(f"{running.url}/metrics", **token)[1].splitlines()
        assert 'mobula_rewards_samples_total{status="ok"} 2.0' in lines
        assert 'mobula_rewards_samples_total{status="failed"} 1.0' in lines
        for status in (200, 401, 413, 422):
            assert f'mobula_rewards_requests_total{{status="{status}"}} 1.0' in lines
        paths = fetch(f"{running.url}/openapi.json", **token)[1]["paths"]
        assert set(paths) == {"/score", "/lightrft", "/health", "/metrics"}
        assert fetch(f"{running.url}/docs", **token)[0] == 200


def test_a_full_server_returns_when_to_retry_and_a_stuck_one_is_unhealthy() -> None:
    release = threading.Event()

    def hang(request: RewardRequest) -> Outcome:
        release.wait(30)
        return Score(1.0)

    with serving(reward_app(hang, timeout_s=1.0, max_waiting=1)) as running:
        replies: list[tuple[int, Any, dict[str, str]]] = []
        askers = [
            threading.Thread(target=lambda: replies.append(fetch(f"{running.url}/score", {"samples": [SAMPLE] * 2})))
            for _ in range(4)
        ]
        try:
            states = ({"busy": 1, "waiting": 0}, {"busy": 1, "waiting": 1}, {}, {})
            for asker, state in zip(askers, states, strict=True):
                asker.start()
                wait_until(lambda state=state: state.items() <= health(running).items(), what=lambda: health(running))
            for asker in askers:
                asker.join(20)
            # One is scored and one waits, until both have timed out; the queue is full for the others.
            statuses = sorted(status for status, _, _ in replies)
            assert statuses == [200, 200, 503, 503]
            assert all(headers["retry-after"] == "1" for status, _, headers in replies if status == 503)
            late = [outcome["status"] for status, body, _ in replies if status == 200 for outcome in body["outcomes"]]
            assert late == ["timed_out"] * 4
            status, body, _ = fetch(f"{running.url}/health")
            assert (status, body["status"], body["stuck"]) == (503, "stuck", 1)
        finally:
            release.set()
        wait_until(lambda: health(running).items() >= {"status": "ok", "stuck": 0}.items())


def test_stopping_lets_what_is_in_flight_finish() -> None:
    entered = threading.Event()

    def slow(request: RewardRequest) -> Outcome:
        entered.set()
        time.sleep(0.5)
        return Score(1.0)

    scorer = Scorer(slow)
    running = Running(
        make_app(RewardServer(ScorerThreads([scorer], max_waiting=4), 5.0, 10_000), Address("127.0.0.1", 0, None))
    )
    replies: list[Any] = []
    asker = threading.Thread(target=lambda: replies.append(fetch(f"{running.url}/score", {"samples": [SAMPLE]})))
    asker.start()
    assert entered.wait(10)
    running.stop()
    asker.join(10)
    assert replies[0][0] == 200 and replies[0][1]["outcomes"][0]["value"] == 1.0
    assert scorer.is_closed
    with pytest.raises(urllib.error.URLError):
        fetch(f"{running.url}/health")


def test_a_request_that_was_given_up_is_not_scored() -> None:
    release, scored = threading.Event(), []

    def score(request: RewardRequest) -> Outcome:
        release.wait(30)
        scored.append(request.response.text)
        return Score(1.0)

    threads = ScorerThreads([Scorer(score)], max_waiting=2)
    requests = {text: LightrftBody(queries=[text]).requests("response") for text in ("first", "given up", "last", "x")}
    running = threads.submit(requests["first"], time.monotonic() + 60)
    wait_until(lambda: threads.num_busy)
    given_up = threads.submit(requests["given up"], time.monotonic() + 60)
    last = threads.submit(requests["last"], time.monotonic() + 60)
    with pytest.raises(BusyError):
        threads.submit(requests["x"], time.monotonic() + 60)
    assert given_up.cancel()
    release.set()
    assert [outcome for future in (running, last) for outcome in future.result(20)] == [Score(1.0), Score(1.0)]
    threads.close(10)
    assert scored == ["first", "last"]
